"""Layers whose builders share a parameter are tied, also where each is built by another process."""

from dataclasses import dataclass
from functools import cache, partial
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock.errors import PartitionError
from penstock.execute.stages.shared_builders import build_own
from penstock.models import LayerSpec
from penstock.pipeline import Pipeline
from tests.acceptance.ties.test_tied_steps import OPTIMIZERS, TASKS, learn
from tests.support.local_pipelines import VOCABULARY, WIDTH, block, error_of, named, on_ranks, settle, token_loss
from tests.support.ranks import run_ranks
from tests.support.reference import reference_step
from tests.support.using import Using

FLOAT64 = torch.float64


def table_of(weight):
    return Using(lambda self, x: F.embedding(x, self.table), table=weight)


def head(weight):
    return Using(lambda self, x: F.linear(x, self.weight), weight=weight)


def new_table():
    return settle(nn.Embedding(VOCABULARY, WIDTH, dtype=FLOAT64), 7).weight


def blocks(count=2):
    return [LayerSpec(f"block.{index}", partial(block, index, FLOAT64)) for index in range(count)]


def closures():
    table = new_table()
    return [LayerSpec("in", lambda: table_of(table)), *blocks(), LayerSpec("out", lambda: head(table))]


def functions_of_a_model():
    """The builders hand out parts of a model that is there already, of which two share a weight."""
    table = new_table()
    model = nn.ModuleList([table_of(table), *[block(index, FLOAT64) for index in range(2)], head(table)])
    names = ("in", "block.0", "block.1", "out")
    return [LayerSpec(name, partial(model.__getitem__, index)) for index, name in enumerate(names)]


@cache
def cached_table():
    return new_table()


def a_module_and_a_builder():
    return [table_of(cached_table()), *blocks(), LayerSpec("out", lambda: head(cached_table()))]


WAYS = [closures, functions_of_a_model, a_module_and_a_builder]


def learn_on_rank(rank, way, schedule):
    pipeline = Pipeline(way(), schedule, 4, token_loss, **TASKS[0].options)
    learn(pipeline.parameters(), OPTIMIZERS["sgd"], lambda task: pipeline.step(*task.inputs, target=task.target))
    return {name: parameter.detach() for name, parameter in pipeline.named_parameters()}


def learn_alone():
    layers = [layer() for layer in closures()]

    def step(task):
        reference_step(layers, task.inputs, {}, task.target, loss=token_loss, num_microbatches=4, **task.options)

    learn(nn.ModuleList(layers).parameters(), OPTIMIZERS["sgd"], step)
    return dict(named(layers))


@pytest.mark.feature("X29")
@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        (3, "1f1b"),
        (2, "zbv"),
        *(pytest.param(shape, marks=pytest.mark.full) for shape in ((2, "1f1b"), (2, "dualpipe"))),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", WAYS)
def test_builders_that_share_a_parameter_tie_it_over_processes(way, shape):
    found = run_ranks(shape[0], learn_on_rank, way, shape[1])

    expected = learn_alone()
    table = expected["0.table"].detach()
    assert sum(any(w.shape == table.shape for w in weights.values()) for weights in found) in (1, 2)
    for weights in found:
        for name, weight in weights.items():
            if weight.shape == table.shape:
                torch.testing.assert_close(weight, table, rtol=1e-12, atol=1e-12)
            if name.startswith("block"):
                index, _, own = name.removeprefix("block.").partition(".")
                torch.testing.assert_close(weight, expected[f"{int(index) + 1}.{own}"], rtol=1e-12, atol=1e-12)


def counting(calls, name, make):
    def build():
        calls.append(name)
        return make()

    return LayerSpec(name, build)


def test_builders_of_other_ranks_are_left_alone_where_the_own_refer_to_nothing():
    calls = []
    layers = [counting(calls, str(index), lambda: nn.Linear(2, 2)) for index in range(4)]

    built = build_own(layers, ["0", "1", "2", "3"], [2, 1])

    assert calls == ["2", "1"]
    assert list(built.shared) == []
    assert list(built.local_layers) == [2, 1]


def test_parts_of_one_model_that_share_nothing_are_not_tied():
    """All parameters were there before the builders were called."""
    model = nn.ModuleList(block(index) for index in range(4))
    layers = [LayerSpec(str(index), partial(model.__getitem__, index)) for index in range(4)]

    assert list(build_own(layers, ["0", "1", "2", "3"], [0, 1]).shared) == []


SHARED = nn.Parameter(torch.zeros(2, 2))


class OfAGlobal(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = SHARED


def of_a_global():
    return head(SHARED)


@dataclass(frozen=True, slots=True)
class Slotted:
    held: list

    def __call__(self):
        return head(self.held[0]["weight"])


FROM_TEXT = {"SHARED": SHARED, "head": head}
exec("def build(): return head(SHARED)", FROM_TEXT)

REFERRING = {
    "a global": (of_a_global, "weight"),
    "a helper's global": (lambda: nn.Sequential(of_a_global()), "0.weight"),
    "a function within": (lambda: (lambda: head(SHARED))(), "weight"),
    "a default": (lambda weight=SHARED: head(weight), "weight"),
    "a keyword": (lambda *, weight=SHARED: head(weight), "weight"),
    "a partial": (partial(head, SHARED), "weight"),
    "a method": (MethodType(lambda self: head(self.weight), SimpleNamespace(weight=SHARED)), "weight"),
    "a method of a list": (partial([head(SHARED)].__getitem__, 0), "weight"),
    "slots": (Slotted([{"weight": SHARED}]), "weight"),
    "a class": (OfAGlobal, "weight"),
    "a function without a module": (FROM_TEXT["build"], "weight"),
}


@pytest.mark.parametrize("way", REFERRING)
def test_a_builder_may_refer_to_what_it_shares_in_any_way(way):
    build, name = REFERRING[way]

    built = build_own([LayerSpec("0", build), build, nn.Tanh(), of_a_global], ["0", "1", "2", "3"], [0, 2])

    assert list(built.shared) == [(f"0.{name}", f"1.{name}"), (f"0.{name}", "3.weight")]


def test_a_builder_that_refers_to_more_than_is_looked_at_may_share():
    table = list(range(20_000))
    calls = []
    layers = [LayerSpec("0", lambda: nn.Linear(2, len(table) - 19_998)), counting(calls, "1", lambda: head(SHARED))]

    assert list(build_own(layers, ["0", "1"], [0]).shared) == []
    assert calls == ["1"]


def test_builders_of_other_ranks_are_asked_without_memory_and_random_numbers_and_their_failures_are_theirs():
    weight, devices = nn.Parameter(torch.zeros(2, 2)), []

    def drawing():
        layers = nn.Sequential(nn.Linear(3, 3), nn.LSTM(2, 2), nn.Embedding(4, 2))
        devices.extend(parameter.device.type for parameter in layers.parameters())
        return head(weight)

    def fail():
        raise RuntimeError("this one needs a file that is on its own rank")

    layers = [LayerSpec("in", lambda: head(weight)), fail, LayerSpec("out", drawing), head(weight), lambda: 3]
    before = torch.get_rng_state()

    built = build_own(layers, ["in", "1", "out", "3", "4"], [0])

    assert list(built.shared) == [("in.weight", "out.weight"), ("in.weight", "3.weight")]
    assert set(devices) == {"meta"}
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_that_would_train_one_object_refuse_it():
    layers = closures()

    errors = on_ranks(2, lambda wires: error_of(Pipeline, layers, "1f1b", 4, token_loss, transport=wires))

    assert [type(error) for error in errors] == [PartitionError] * 2
    assert "'in.table' and 'out.weight' are one parameter" in str(errors[0])
    assert str(errors[0]) == str(errors[1])
