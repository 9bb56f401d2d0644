"""Skips between any stages train as on one device, in every family, forward and backward."""

from functools import partial

import pytest
import torch
from hypothesis import given
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.models import Carry, LayerSpec, Skip
from penstock.schedules import build
from tests.support.local_pipelines import (
    NEARLY,
    WIDTH,
    Around,
    Outcome,
    Task,
    difference,
    differences_on_gloo,
    mistakes,
    on_pipelines,
    second_step,
    step_task,
    values,
    visits_in_order,
)
from tests.support.reference import reference_evaluate
from tests.support.strategies import feasible_schedules

FLOAT64 = torch.float64
LENGTH = 6
TENSOR_BYTES = 2 * LENGTH * WIDTH * 8


class Layer(Around):
    """A block that puts its output into some skips, and adds to its input what it gets from others."""

    def __init__(self, seed, puts=(), gets=()):
        super().__init__(seed, FLOAT64)
        self.puts = nn.ModuleList(map(Skip, puts))
        self.gets = nn.ModuleList(map(Skip, gets))

    def forward(self, x):
        for skip in self.gets:
            x = x + skip.get()
        return self.put(self.inner(x))

    def put(self, x):
        for skip in self.puts:
            skip.put(x)
        return x


class TreeLayer(Layer):
    """Hands on a tree: tensors with and without gradient, and other values."""

    def put(self, x):
        for skip in self.puts:
            skip.put({"value": (x, x.detach() > 0), "factor": 0.5, "nothing": None})
        return x

    def forward(self, x):
        for skip in self.gets:
            handed_on = skip.get()
            value, mask = handed_on["value"]
            assert not mask.requires_grad
            assert handed_on["nothing"] is None
            x = x + value * mask * handed_on["factor"]
        return self.put(self.inner(x))


class Recomputed(Layer):
    """Puts and gets in what runs again in the backward."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class LookingBack(Layer):
    """Carries from slice to slice, too."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.carry = Carry()

    def forward(self, x):  # [batch, seq, width]
        before = self.carry.get()
        sums = x.cumsum(1) if before is None else before + x.cumsum(1)
        self.carry.put(sums[:, -1:])
        return super().forward(x + sums)


def layers(kind, num_layers):
    """A far skip over all layers, with another consumer between; short ones, nested and crossing."""
    last, center = num_layers - 1, num_layers // 2
    puts, gets = {0: ["far"]}, {last: ["far"]}
    if num_layers > 3:
        gets[center] = ["far"]
        puts[1], gets[last - 1] = ["crossing"], ["crossing", *gets.get(last - 1, [])]
    for first in range(0, last - 1, 2):
        puts.setdefault(first, []).append(f"near {first}")
        gets.setdefault(first + 1, []).append(f"near {first}")
    return [kind(index, puts.get(index, ()), gets.get(index, ())) for index in range(num_layers)]


def task(make_layers, num_microbatches):
    shape = (2 * num_microbatches, LENGTH, WIDTH)
    inputs, target = (values(seed, *shape, dtype=FLOAT64) for seed in (1, 2))
    return Task(make_layers, (inputs,), target)


def mistakes_in(schedule, kind):
    return mistakes(task(layers_for(schedule, kind), schedule.num_microbatches), schedule)


def layers_for(schedule, kind):
    return partial(layers, kind, len(schedule.placement.routes[0]) + 1)


KINDS = [Layer, TreeLayer, Recomputed]


@pytest.mark.parametrize(
    ("name", "num_ranks", "kind"),
    [("1f1b", 1, Recomputed), ("zb-h1", 3, Layer), ("zb-h1", 3, Recomputed), ("dualpipe", 2, TreeLayer)],
)
def test_skips_train_as_on_one_device(name, num_ranks, kind):
    assert mistakes_in(build(name, ranks=num_ranks, microbatches=4), kind) == []


def test_skips_go_along_with_what_slices_carry():
    schedule = build("seq1f1b", ranks=3, microbatches=3, slices=3)

    assert mistakes_in(schedule, LookingBack) == []


@pytest.mark.slow
@given(feasible_schedules())
def test_skips_train_in_every_feasible_order(schedule):
    if schedule.is_forward_only:
        return

    assert mistakes_in(schedule, KINDS[schedule.num_microbatches % len(KINDS)]) == []


def two_uses():
    """What is forwarded is used twice in all, so that there is but one order in which to add two gradients up."""
    return [Layer(0, ["a"]), Layer(1), Layer(2, ["b"]), Layer(3, gets=["a"]), Layer(4), Layer(5, gets=["b"])]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_gradients_are_bitwise_equal_where_a_value_is_used_twice(name):
    own = task(two_uses, 4)
    schedule = build(name, ranks=3, microbatches=4)
    assert visits_in_order(schedule)

    found = on_pipelines(3, own, lambda pipeline: step_task(pipeline, own), schedule, None)

    assert difference(found, own.reference(4)) == []


def test_threads_may_hold_the_very_same_skip():
    skip = Skip("a")

    def sharing():
        found = [Layer(0), Layer(1), Layer(2)]
        for layer, role in zip(found, ("puts", "gets", "gets"), strict=True):
            setattr(layer, role, nn.ModuleList([skip]))
        return found

    assert mistakes(task(sharing, 6), build("1f1b", ranks=3, microbatches=6)) == []


def test_layers_that_are_built_apart_find_each_other_by_name():
    def specs():
        return [
            LayerSpec(str(index), partial(Layer, index, *ends))
            for index, ends in enumerate([(["a"],), (), ((), ["a"])])
        ]

    own, plain = task(specs, 4), task(lambda: [Layer(0, ["a"]), Layer(1), Layer(2, (), ["a"])], 4)

    found = on_pipelines(3, own, lambda pipeline: step_task(pipeline, own))

    assert difference(found, plain.reference(4)) == []


def test_evaluation_hands_on_skips_and_keeps_nothing():
    own = task(partial(layers, Layer, 5), 4)

    def case(pipeline):
        return Outcome(pipeline.evaluate(*own.inputs, target=own.target), {})

    found = on_pipelines(3, own, case)

    expected = reference_evaluate(own.make_layers(), own.inputs, {}, own.target, loss=own.loss, num_microbatches=4)
    assert difference(found, (expected, {})) == []


def message_bytes(make_layers):
    own = task(make_layers, 2)

    def case(pipeline):
        step_task(pipeline, own, record=True)
        return pipeline.recording.message_bytes

    return on_pipelines(3, own, case, "1f1b", 2)[0]


@pytest.mark.feature("C2")
@pytest.mark.parametrize(
    ("make_layers", "num_tensors"),
    [
        (lambda: [layer for name in "abc" for layer in (Layer(0, [name]), Layer(1, (), [name]))], 1),
        (lambda: [Layer(0, ["a"]), *map(Layer, range(4)), Layer(5, (), ["a"])], 2),
    ],
    ids=["within a stage", "far"],
)
def test_a_skip_adds_its_bytes_to_the_message_of_every_stage_on_the_way_and_of_no_other(make_layers, num_tensors):
    assert message_bytes(make_layers) == (num_tensors * TENSOR_BYTES, num_tensors * TENSOR_BYTES, 0)


@pytest.mark.feature("C2")
@pytest.mark.slow
def test_skips_train_between_processes(four_ranks):
    assert differences_on_gloo(four_ranks, cases_on_gloo, second_step, **NEARLY) == [[]] * 3


def cases_on_gloo():
    schedules = [build(name, ranks=4, microbatches=8) for name in ("1f1b", "zbv", "dualpipe")]
    return [(task(layers_for(each, TreeLayer), 8), each, 8, {}) for each in schedules]
