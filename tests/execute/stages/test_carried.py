"""A stage works on one slice after another as on the whole sequence, and releases what no slice needs any more."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.execute.stages.carried import Carrying, begin_slice, refuse_layers_that_look_back
from penstock.execute.stages.feature import modules_with
from penstock.execute.stages.stage import Stage
from penstock.models import Carry
from tests.support.local_pipelines import values
from tests.support.one_stage import OneStage, step_of

WIDTH = 3
NUM_SLICES = 3


class Mixing(nn.Module):
    """Every position is the sum of a product of it with a weight and of all before it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(values(1, WIDTH))
        self.carry = Carry()
        self.seen = []

    def forward(self, x):  # [batch, seq, width]
        before = self.carry.get()
        self.seen.append(before)
        sums = (x * self.weight).cumsum(1) if before is None else before + (x * self.weight).cumsum(1)
        self.carry.put(sums[:, -1:] * 1.0)
        return sums.tanh()


class Slices:
    """A stage, and the slices of two microbatches on it."""

    def __init__(self, layer, **options):
        stage = Stage(4, {"0": layer})
        self.modules = modules_with(stage.modules, Carrying)
        feature = partial(begin_slice, 4, self.modules, NUM_SLICES, None)
        self.one = OneStage(stage, features=[feature], step=step_of(num_slices=NUM_SLICES), **options)
        self.carried = self.one.step.carried
        self.saved = {}

    def forward(self, microbatch, part, inputs):
        outputs, self.saved[microbatch, part] = self.one.forward(
            inputs.detach().requires_grad_(), place=(microbatch, part)
        )
        return outputs.detach()

    def backward(self, microbatch, part, gradient):
        return self.one.backward(self.saved.pop((microbatch, part)), gradient)

    def left(self, part):
        """What a slice of microbatch 0 left."""
        return self.saved[0, part].parts[0].carried_out[0]


def whole(inputs, gradient):
    layer = Mixing()
    inputs = inputs.detach().requires_grad_()
    layer(inputs).backward(gradient)
    return inputs.grad, layer.weight.grad


def test_two_microbatches_under_way_at_once_get_the_gradients_of_whole_sequences():
    layer = Mixing()
    slices = Slices(layer)
    inputs, gradients = ([values(seed + m, 2, 6, WIDTH) for m in range(2)] for seed in (10, 20))
    found = {}

    for part in range(NUM_SLICES):
        for m in (0, 1):
            slices.forward(m, part, inputs[m].chunk(NUM_SLICES, 1)[part])
    assert slices.carried.keys() == set()  # the last slices have taken what was carried
    for part in reversed(range(NUM_SLICES)):
        for m in (1, 0):
            (found[m, part],) = slices.backward(m, part, gradients[m].chunk(NUM_SLICES, 1)[part])

    expected = [whole(*pair) for pair in zip(inputs, gradients, strict=True)]
    for m, (expected_input, _) in enumerate(expected):
        torch.testing.assert_close(torch.cat([found[m, part] for part in range(NUM_SLICES)], 1), expected_input)
    torch.testing.assert_close(layer.weight.grad, expected[0][1] + expected[1][1])
    assert slices.carried == {}


def test_without_gradients_what_a_slice_left_is_freed_when_the_next_has_run():
    layer = Mixing()
    slices = Slices(layer, is_training=False)

    with torch.no_grad():
        for part in range(2):
            slices.forward(0, part, values(part, 2, 2, WIDTH))
    taken = weakref.ref(layer.seen.pop())
    gc.collect()

    assert taken() is None
    assert slices.carried[4, 0][0].value is not None


def test_the_value_goes_when_a_newer_one_is_left_and_the_gradients_when_they_are_used():
    slices = Slices(Mixing())
    for part in range(NUM_SLICES):
        slices.forward(0, part, values(part, 2, 2, WIDTH))
    left = [slices.left(part) for part in range(NUM_SLICES - 1)]

    assert [each.value for each in left] == [None, None]
    slices.backward(0, 2, values(5, 2, 2, WIDTH))
    assert [len(each.gradients) for each in left] == [0, 1]


def test_a_layer_that_runs_again_in_its_backward_takes_what_it_took():
    layer = Mixing()
    slices = Slices(layer)
    for part in range(2):
        slices.forward(0, part, values(part, 2, 2, WIDTH))

    def run_again(gradients):
        layer(values(1, 2, 2, WIDTH))

    slices.saved[0, 1].edges[0].node.register_prehook(run_again)
    slices.backward(0, 1, values(5, 2, 2, WIDTH))

    assert layer.seen[2] is layer.seen[1] is not None


class Holder(nn.Module):
    """Carries for what it holds."""

    def __init__(self, held):
        super().__init__()
        self.held, self.carry = held, Carry()


class OwnGRU(nn.GRU):
    """Carries for itself."""

    def __init__(self):
        super().__init__(2, 2)
        self.carry = Carry()


@pytest.mark.parametrize(
    ("layer", "is_refused"),
    [
        (Holder(nn.GRU(2, 2)), False),
        (Holder(nn.ModuleList([nn.ModuleDict({"a": nn.GRU(2, 2)})])), False),
        (OwnGRU(), False),
        (nn.Sequential(Holder(nn.Linear(2, 2)), nn.GRU(2, 2)), True),
        (Holder(nn.TransformerEncoderLayer(2, 1)), True),  # its attention is called by a module that carries nothing
    ],
    ids=["held", "held in a list", "by itself", "beside", "further down"],
)
def test_who_calls_a_layer_that_looks_back_may_carry_for_it(layer, is_refused):
    stage = Stage(0, {"0": nn.Linear(2, 2), "a": layer})

    def accept():
        refuse_layers_that_look_back([stage], (nn.RNNBase, nn.MultiheadAttention))

    if is_refused:
        text = r"layer 'a' \((GRU|MultiheadAttention)\) looks back .* in a ps.Carry, or use a schedule with 1 slice"
        with pytest.raises(ConfigError, match=text):
            accept()
    else:
        accept()
