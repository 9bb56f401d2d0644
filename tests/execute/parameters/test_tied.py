"""A tied parameter has one value and one gradient, however many ranks and stages hold it."""

import re

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError, PartitionError, PipelineError
from penstock.execute.control.collectives import Control
from penstock.execute.parameters.gradient_store import GradientStore
from penstock.execute.parameters.tied import TiedCopy, described_copies, require_equal_kinds
from penstock.pipeline import Pipeline
from tests.support.local_pipelines import (
    VOCABULARY,
    WIDTH,
    Task,
    error_of,
    float_layers,
    on_pipelines,
    on_ranks,
    step_task,
    token_layers,
    token_loss,
    token_task,
    values,
)

FLOAT64 = torch.float64


# ---- one copy


def parameter_of(rank, *, gradient=None):
    parameter = nn.Parameter(torch.full((2, 3), float(rank), dtype=FLOAT64))
    parameter.grad = gradient
    return parameter


def begun(copied):
    """Return the gradients of a copy in a step that has begun."""
    store = GradientStore(copied.parameters.values)
    store.begin_step()
    store.set_aside(copied.trained().values())
    return store


@pytest.mark.feature("H5")
def test_all_holders_start_with_the_owners_value():
    def case(wires):
        copied = TiedCopy({"weight": parameter_of(wires.rank)}, [1, 0, 2])
        copied.share_values(wires)
        return copied.parameters["weight"].detach()

    assert [value.unique().tolist() for value in on_ranks(3, case)] == [[1.0], [1.0], [1.0]]


@pytest.mark.feature("E8", "X23")
def test_all_holders_get_the_sum_of_this_step_on_top_of_what_was_accumulated():
    def case(wires):
        if wires.rank == 1:
            return None
        parameter = parameter_of(wires.rank, gradient=torch.full((2, 3), 100.0, dtype=FLOAT64))
        other, frozen = parameter_of(wires.rank), nn.Parameter(torch.zeros(2), requires_grad=False)
        copied = TiedCopy({"weight": parameter, "frozen": frozen, "other": other}, [2, 0])
        store = begun(copied)
        parameter.grad = values(wires.rank, 2, 3, dtype=FLOAT64)
        other.grad = torch.full((2, 3), 1.0 + wires.rank, dtype=FLOAT64)
        copied.reduce(wires, store)
        return parameter.grad, frozen.grad, other.grad.unique().tolist()

    first, _, last = on_ranks(3, case)

    expected = 100.0 + (values(2, 2, 3, dtype=FLOAT64) + values(0, 2, 3, dtype=FLOAT64))
    for total, *others in (first, last):
        assert torch.equal(total, expected)
        assert others == [None, [4.0]]


class Counting(nn.Module):
    """A layer with a saved and an unsaved buffer."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(value)))
        self.register_buffer("mean", torch.full((2,), float(value)))
        self.register_buffer("table", torch.full((3,), float(value)), persistent=False)


def test_copies_of_a_layer_start_with_the_owners_buffers_and_keep_saved_ones_equal():
    def case(wires):
        layer = Counting(wires.rank)
        copied = TiedCopy({"weight": layer.weight}, [1, 0], [layer])
        copied.share_values(wires)
        start = [tensor.unique().tolist() for tensor in (layer.weight, layer.mean, layer.table)]
        for buffer in layer.buffers():
            buffer += 10 * (1 + wires.rank)
        store = begun(copied)
        copied.reduce(wires, store)
        return start, layer.mean.unique().tolist(), layer.table.unique().tolist()

    first, second = on_ranks(2, case)

    assert first == ([[1.0]] * 3, [21.0], [11.0])
    assert second == ([[1.0]] * 3, [21.0], [21.0])


# ---- in a pipeline


@pytest.mark.parametrize(("kind", "schedule"), [(nn.Embedding, "1f1b"), (nn.EmbeddingBag, "dualpipe")])
def test_a_table_that_its_lookups_renormalize_is_not_tied_over_ranks(kind, schedule):
    def layers():
        first = kind(VOCABULARY, WIDTH, max_norm=0.5, dtype=FLOAT64)
        last = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=FLOAT64)
        last.weight = first.weight
        return [nn.Sequential(first), nn.Tanh(), nn.Tanh(), last]

    def case(wires):
        return error_of(Pipeline, layers(), schedule, 4, token_loss, transport=wires)

    for error in on_ranks(2, case):
        assert isinstance(error, PartitionError | ConfigError)  # its own rank, and the other
        assert f"layer '0' has an {kind.__name__} with max_norm=0.5 whose weight other ranks hold too" in str(error)
    Pipeline(layers(), schedule="gpipe", microbatches=2, loss=token_loss).close()  # one rank has one table


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
@pytest.mark.parametrize("attribute", ["grad", "main_grad"])
def test_gradients_that_are_views_of_a_flat_buffer_stay_there(schedule, attribute):
    task = token_task(8, FLOAT64)

    def run(wires, is_flat):
        options = {**task.options, "main_gradients": attribute == "main_grad"}
        pipeline = Pipeline(tied_modules(), schedule, 4, token_loss, transport=wires, **options)
        parameters = list(pipeline.parameters())
        flat = torch.zeros(sum(parameter.numel() for parameter in parameters), dtype=FLOAT64)
        if is_flat:
            parts = flat.split([parameter.numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                setattr(parameter, attribute, part.view_as(parameter))
        for _ in range(2):
            pipeline.step(*task.inputs, target=task.target)
        pipeline.close()
        return flat if is_flat else torch.cat([getattr(parameter, attribute).flatten() for parameter in parameters])

    for found, expected in zip(on_ranks(2, run, True), on_ranks(2, run, False), strict=True):
        assert torch.equal(found, expected)


def tied_modules():
    layers = token_layers(FLOAT64, 2)
    layers[3].weight = layers[0].weight
    return layers


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_layer_that_appears_twice_is_one_layer(num_ranks):
    def make_layers():
        first, second = float_layers(FLOAT64, 2)
        return [first, second, first]

    task = Task(make_layers, (values(1, 4, WIDTH, dtype=FLOAT64),), values(2, 4, WIDTH, dtype=FLOAT64))

    outcomes = on_pipelines(num_ranks, task, lambda pipeline: step_task(pipeline, task), num_microbatches=2)

    _, gradients = task.reference(2)
    for outcome in outcomes:
        for name, gradient in outcome.gradients.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-12, atol=1e-12)


def test_a_failed_step_keeps_the_tied_gradient_of_the_step_before():
    task = token_task(4, FLOAT64)

    def case(wires):
        losses = [token_loss, lambda output, target: None]
        pipeline = Pipeline(tied_modules(), "1f1b", 2, lambda o, t: losses[0](o, t), transport=wires)
        pipeline.step(*task.inputs, target=task.target)
        weight = dict(pipeline.named_parameters())["3.weight" if wires.rank else "0.weight"]
        before = weight.grad.clone()
        losses.reverse()
        error = error_of(pipeline.step, *task.inputs, target=task.target)
        return error, torch.equal(weight.grad, before)

    found = on_ranks(2, case)

    assert all(isinstance(error, PipelineError) for error, _ in found)
    assert [is_kept for _, is_kept in found] == [True, True]


REFUSED = {
    "other shapes": (
        lambda rank: nn.ParameterDict({"weight": torch.zeros((3, 2) if rank else (2, 3))}),
        r"\(2, 3\) float32, trained on rank 0 \(weight\), but \(3, 2\) float32, trained",
    ),
    "frozen on one": (
        lambda rank: nn.Linear(3, 2, bias=False).requires_grad_(rank == 0),
        "trained on rank 0 .* but .* frozen on rank 1",
    ),
    "no shape": (lambda rank: nn.LazyLinear(3), "'weight' is without a shape before its first input on rank 0"),
    "other layers": (
        lambda rank: nn.Linear(2, 2, bias=rank == 0),
        "rank 0 holds 2 parameters and buffers of a stage, but rank 1 holds 1 of its copy",
    ),
}


@pytest.mark.parametrize("difference", REFUSED)
def test_copies_that_are_not_of_one_kind_with_a_shape_are_refused_on_every_rank(difference):
    make_layer, text = REFUSED[difference]

    def agree(wires):
        control, layer = Control(wires), make_layer(wires.rank)
        copied = TiedCopy(dict(layer.named_parameters()), [0, 1])
        everyone = control.all_gather_object(described_copies({0: copied}))
        return str(error_of(require_equal_kinds, everyone, control.names))

    for message in on_ranks(2, agree):
        assert re.search(text, message)
