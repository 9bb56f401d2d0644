"""A batch may come in containers and masks: losses and gradients on 2 ranks are those of one process.

Each case hides rows of the batch in another object. A layer on each rank reads them as a keyword, the first layer as
an input, or the loss as a target. A microbatch that got rows of another one would be off by tenths.
"""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from penstock.pipeline import Pipeline
from tests.support.local_pipelines import WIDTH, Around, gradients_of, named, on_ranks, square_loss, values
from tests.support.mesh_pipelines import on_mesh

ROWS, MICROBATCHES = 8, 4

Pair = namedtuple("Pair", ["rows", "name"])


@dataclass(frozen=True, slots=True)
class Frozen:
    """A dataclass with a field that its constructor does not take."""

    rows: Any
    late: Any = field(init=False, default=None)


@dataclass
class Outer:
    """A dataclass of other containers."""

    inner: Any


class Graph:
    """A class that is registered with torch's pytrees."""

    def __init__(self, nodes, name):
        self.nodes, self.name = nodes, name


_pytree.register_pytree_node(Graph, lambda graph: ([graph.nodes], graph.name), lambda nodes, name: Graph(*nodes, name))


class Named(dict):
    """A dict that shows its entries as attributes."""

    __getattr__ = dict.__getitem__


def late(rows):
    value = Frozen(None)
    object.__setattr__(value, "late", rows)
    return value


def encoding(kind, rows):
    return getattr(pytest.importorskip("transformers"), kind)({"input_ids": rows, "names": ["a"] * len(rows)})


CONTAINERS = {
    "dict": (lambda rows: {"a": rows}, lambda value: value["a"]),
    "OrderedDict": (lambda rows: OrderedDict(a=rows), lambda value: value["a"]),
    "UserDict": (lambda rows: UserDict(a=rows), lambda value: value["a"]),
    "dict subclass": (lambda rows: Named(a=rows, scale=2), lambda value: value.a),
    "BatchEncoding": (partial(encoding, "BatchEncoding"), lambda value: value.input_ids),
    "BatchFeature": (partial(encoding, "BatchFeature"), lambda value: value["input_ids"]),
    "named tuple": (lambda rows: Pair(rows, "a"), lambda value: value.rows),
    "frozen dataclass": (Frozen, lambda value: value.rows),
    "late field": (late, lambda value: value.late),
    "registered": (lambda rows: Graph(rows, "a"), lambda value: value.nodes),
    "result of torch": (lambda rows: torch.return_types.max((rows, rows > 0)), lambda value: value.values),
    "nested": (
        lambda rows: {"a": Outer([UserDict(b=(Graph(rows, "a"), 1)), "text"])},
        lambda value: value["a"].inner[0]["b"][0].nodes,
    ),
}


INPUTS, TARGET, EXTRA = (values(seed, ROWS, WIDTH, dtype=torch.float64) for seed in (1, 2, 3))


class Reading(Around):
    """Adds what it reads from a keyword; the first layer reads its input from an object, too."""

    def __init__(self, seed, read):
        super().__init__(seed, torch.float64)
        self.read, self.is_first = read, seed == 0

    def forward(self, value, *, extra):
        return self.inner(self.read(value) if self.is_first else value) + self.read(extra)


def layers_of(read):
    return [Reading(seed, read) for seed in range(4)]


def assert_as_in_one_process(ranks):
    """Compare losses and gradients with those of the unsplit batch."""
    layers, x = layers_of(lambda rows: rows), INPUTS
    for layer in layers:
        x = layer(x, extra=EXTRA)
    loss = square_loss(x, TARGET)
    loss.backward()
    gradients = gradients_of(named(layers))
    assert {name for _, found in ranks for name in found} == gradients.keys()
    for own_loss, found in ranks:
        torch.testing.assert_close(own_loss, loss.detach(), rtol=1e-12, atol=1e-12)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(("make", "read"), CONTAINERS.values(), ids=CONTAINERS)
def test_inputs_keywords_and_targets_in_a_container_are_cut(make, read, schedule):
    def loss(output, target):
        return square_loss(output, read(target))

    def case(wires):
        pipeline = Pipeline(layers_of(read), schedule, MICROBATCHES, loss, transport=wires)
        evaluated = pipeline.evaluate(make(INPUTS), target=make(TARGET), extra=make(EXTRA)).loss
        result = pipeline.step(make(INPUTS), target=make(TARGET), extra=make(EXTRA))
        torch.testing.assert_close(evaluated, result.loss, rtol=1e-12, atol=1e-12)
        return result.loss, gradients_of(pipeline.named_parameters())

    assert_as_in_one_process(on_ranks(2, case))


def test_replicas_cut_the_rows_that_each_was_given():
    make, read = CONTAINERS["nested"]

    def case(places):
        pipeline = Pipeline(layers_of(read), "1f1b", 2, square_loss, mesh=places)
        inputs, target, extra = (each.chunk(2)[pipeline.replica] for each in (INPUTS, TARGET, EXTRA))
        result = pipeline.step(make(inputs), target=target, extra=make(extra))
        return result.loss, gradients_of(pipeline.named_parameters())

    assert_as_in_one_process(on_mesh(2, 2, case))
