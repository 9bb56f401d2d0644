"""A step that changes a buffer which several ranks hold is refused; one that leaves it alone costs nothing else."""

import copy
from functools import cache, partial

import pytest
import torch
from torch import nn

from penstock.errors import PipelineError
from penstock.execute.observing.shared_buffers import shared_buffers
from penstock.models import LayerSpec
from penstock.pipeline import Pipeline
from tests.support.local_pipelines import WIDTH, assert_errors, error_of, named, on_ranks, settle, square_loss, values
from tests.support.reference import reference_step

FLOAT64 = torch.float64
INPUTS = values(1, 8, WIDTH, dtype=FLOAT64)
TARGET = torch.zeros_like(INPUTS)


def linear():
    return settle(nn.Linear(WIDTH, WIDTH, dtype=FLOAT64), 3)


def shared_norm(**options):
    """The first and the third layer are one module, and on two ranks."""
    norm = nn.BatchNorm1d(WIDTH, dtype=FLOAT64, **options)
    return [norm, linear(), norm, nn.Identity()]


def one_buffer():
    """Two modules count in one buffer, past its version."""

    class Counter(nn.Module):
        def __init__(self, count):
            super().__init__()
            self.register_buffer("count", count)

        def forward(self, hidden):
            if self.training:
                self.count.data.add_(1)
            return hidden

    count = torch.zeros(())
    return [Counter(count), linear(), Counter(count), linear()]


def builders():
    norm = nn.BatchNorm1d(WIDTH, dtype=FLOAT64)

    @cache
    def build():
        return norm

    return [LayerSpec("a", build), LayerSpec("b", linear), LayerSpec("c", build), LayerSpec("d", linear)]


class Replacing(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=FLOAT64))

    def forward(self, hidden):
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return hidden - self.mean


def replaced_buffer():
    shared = nn.Sequential(Replacing())
    return [shared, linear(), shared, linear()]


CHANGING = {
    "norm": shared_norm,
    "without weights": partial(shared_norm, affine=False),
    "one buffer": one_buffer,
    "replaced": replaced_buffer,
}
SCHEDULES = {"1f1b": {}, "gpipe": {"recompute": True}, "dualpipe": {}}


def train(wires, make_layers, schedule="1f1b"):
    pipeline = Pipeline(make_layers(), schedule, 4, square_loss, transport=wires, **SCHEDULES[schedule])
    error = error_of(pipeline.step, INPUTS, target=TARGET)
    pipeline.close()
    return error


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", pytest.param("dualpipe", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CHANGING)
def test_a_step_that_changes_a_buffer_of_two_ranks_is_refused_on_both(case, schedule):
    errors = on_ranks(2, train, CHANGING[case], schedule)

    assert_errors(errors, PipelineError, "which is the buffer", "Give each layer a module of its own")


def train_process(rank, make_layers):
    return str(train(None, make_layers))


@pytest.mark.parametrize("make_layers", [shared_norm, builders])
def test_ranks_that_are_processes_refuse_it_too(two_ranks, make_layers):
    for text in two_ranks.run(train_process, make_layers):
        assert "has changed" in text
        assert "running_mean' of another rank too" in text


class Caching(nn.Module):
    """A layer that counts in a buffer which is not saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("uses", torch.zeros(()), persistent=False)
        self.register_buffer("table", values(7, WIDTH, dtype=FLOAT64))

    def forward(self, hidden):
        self.uses += 1
        return hidden * self.table


def frozen_norm():
    layers = shared_norm()
    settle(layers[0], 5)
    layers[0].running_mean.copy_(values(6, WIDTH, dtype=FLOAT64))
    layers[0].eval()
    return layers


def caching():
    layer = Caching()
    return [layer, linear(), layer, linear()]


def norm_on_one_rank():
    norm = nn.BatchNorm1d(WIDTH, dtype=FLOAT64)
    return [norm, norm, linear(), nn.Identity()]


@pytest.mark.parametrize("make_layers", [frozen_norm, caching, norm_on_one_rank])
def test_buffers_that_stay_or_are_not_saved_or_are_on_one_rank_train_as_in_one_process(make_layers):
    layers = make_layers()
    for _ in range(3):
        reference_step(layers, (INPUTS,), {}, TARGET, loss=square_loss, num_microbatches=4)
    expected = {name: parameter.grad for name, parameter in named(layers)}

    def case(wires):
        pipeline = Pipeline(make_layers(), "1f1b", 4, square_loss, transport=wires)
        for _ in range(3):
            pipeline.step(INPUTS, target=TARGET)
        found = {name: parameter.grad for name, parameter in pipeline.named_parameters()}
        return found, pipeline.state_dict()

    state = nn.Sequential(*layers).state_dict()
    for gradients, own_state in on_ranks(2, case):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12)
        for name, value in own_state.items():
            assert torch.equal(value, state[name])


def test_values_that_a_caller_loads_between_steps_are_taken():
    def case(wires):
        pipeline = Pipeline(caching(), "1f1b", 4, square_loss, transport=wires)
        pipeline.step(INPUTS, target=TARGET)
        state = {name: value + 1 for name, value in pipeline.state_dict().items()}
        pipeline.load_state_dict(state)
        return pipeline.step(INPUTS, target=TARGET).loss

    first, second = on_ranks(2, case)
    assert first == second


def test_only_saved_buffers_of_layers_on_several_ranks_are_watched():
    first, second = caching()[:2]
    layers = {0: first, 1: second, 2: copy.deepcopy(first), 3: first}

    assert shared_buffers(layers, [0, 1], "abcd", [0, 0, 1, 1]) == [("a.table", "d.table")]
    assert shared_buffers(layers, [3], "abcd", [0, 0, 1, 1]) == [("d.table", "a.table")]
    assert shared_buffers(layers, [2, 3], "abcd", [0, 0, 0, 0]) == []
    assert shared_buffers({0: first, 1: second, 2: None}, [0], "abc", [0, 0, 1]) == []
