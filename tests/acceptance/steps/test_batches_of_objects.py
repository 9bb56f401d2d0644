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
DOUBLE = {"dtype": torch.float64}

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


class Adding(Around):
    """Adds what it reads from a keyword."""

    def __init__(self, seed, read):
        super().__init__(seed, torch.float64)
        self.read = read

    def forward(self, x, *, extra):
        return self.inner(x) + self.read(extra)


class Opening(Around):
    """Takes its input from an object."""

    def __init__(self, seed, read):
        super().__init__(seed, torch.float64)
        self.read = read

    def forward(self, value):
        return self.inner(self.read(value))


def adding_layers(read):
    return [Adding(seed, read) for seed in range(4)]


def opening_layers(read):
    return [Opening(0, read), *(Around(seed, torch.float64).inner for seed in range(1, 4))]


def of_one_process(layers, loss, x, target, **keywords):
    """Return the loss and the gradients of the unsplit batch."""
    for layer in layers:
        x = layer(x, **keywords)
    found = loss(x, target)
    found.backward()
    return found.detach(), gradients_of(named(layers))


def assert_as_in_one_process(ranks, expected):
    loss, gradients = expected
    assert {name for _, found in ranks for name in found} == gradients.keys()
    for own_loss, found in ranks:
        torch.testing.assert_close(own_loss, loss, rtol=1e-12, atol=1e-12)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-12, atol=1e-12, msg=name)


def on_two_ranks(make_layers, loss, schedule, x, target, **keywords):
    """Return the loss and the gradients that each of two ranks comes to; evaluations find the same loss."""

    def case(wires):
        pipeline = Pipeline(make_layers(), schedule, MICROBATCHES, loss, transport=wires)
        evaluated = pipeline.evaluate(x, target=target, **keywords).loss
        result = pipeline.step(x, target=target, **keywords)
        torch.testing.assert_close(evaluated, result.loss, rtol=1e-12, atol=1e-12)
        return result.loss, gradients_of(pipeline.named_parameters())

    return on_ranks(2, case)


INPUTS, TARGET, EXTRA = (values(seed, ROWS, WIDTH, **DOUBLE) for seed in (1, 2, 3))


@pytest.mark.parametrize(("make", "read"), CONTAINERS.values(), ids=CONTAINERS)
def test_a_keyword_in_a_container_is_cut(make, read):
    ranks = on_two_ranks(partial(adding_layers, read), square_loss, "zb-h1", INPUTS, TARGET, extra=make(EXTRA))

    expected = of_one_process(adding_layers(lambda rows: rows), square_loss, INPUTS, TARGET, extra=EXTRA)
    assert_as_in_one_process(ranks, expected)


@pytest.mark.parametrize(("make", "read"), CONTAINERS.values(), ids=CONTAINERS)
def test_an_input_and_a_target_in_a_container_are_cut(make, read):
    def loss(output, target):
        return square_loss(output, read(target))

    ranks = on_two_ranks(partial(opening_layers, read), loss, "1f1b", make(INPUTS), make(TARGET))

    expected = of_one_process(opening_layers(lambda rows: rows), square_loss, INPUTS, TARGET)
    assert_as_in_one_process(ranks, expected)


def test_replicas_cut_the_rows_that_each_was_given():
    make, read = CONTAINERS["nested"]
    mesh_rows = ROWS // 2

    def case(places):
        pipeline = Pipeline(adding_layers(read), "1f1b", 2, square_loss, mesh=places)
        own = slice(pipeline.replica * mesh_rows, (pipeline.replica + 1) * mesh_rows)
        result = pipeline.step(INPUTS[own], target=TARGET[own], extra=make(EXTRA[own]))
        return result.loss, gradients_of(pipeline.named_parameters())

    ranks = on_mesh(2, 2, case)

    expected = of_one_process(adding_layers(lambda rows: rows), square_loss, INPUTS, TARGET, extra=EXTRA)
    assert_as_in_one_process(ranks, expected)
