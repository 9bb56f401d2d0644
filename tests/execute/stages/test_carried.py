"""A stage works on one slice after another as on the whole sequence, and releases what no slice needs any more."""

import gc
import weakref
from contextlib import nullcontext
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
from tests.support.using import Using

WIDTH = 3
NUM_SLICES = 3


def mix(self, x):
    """Make every position of [batch, seq, width] the sum of a product of it with a weight and of all before it."""
    before = self.carry.get()
    self.seen.append(before)
    sums = (x * self.weight).cumsum(1) if before is None else before + (x * self.weight).cumsum(1)
    self.carry.put(sums[:, -1:] * 1.0)
    return sums.tanh()


def mixing():
    return Using(mix, weight=nn.Parameter(values(1, WIDTH)), carry=Carry(), seen=[])


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


def test_two_microbatches_under_way_at_once_get_the_gradients_of_whole_sequences():
    layer = mixing()
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

    whole = mixing()
    for m, (sequence, gradient) in enumerate(zip(inputs, gradients, strict=True)):
        whole.carry = Carry()
        whole(sequence.requires_grad_()).backward(gradient)
        torch.testing.assert_close(torch.cat([found[m, part] for part in range(NUM_SLICES)], 1), sequence.grad)
    torch.testing.assert_close(layer.weight.grad, whole.weight.grad)
    assert slices.carried == {}


def test_without_gradients_what_a_slice_left_is_freed_when_the_next_has_run():
    layer = mixing()
    slices = Slices(layer, is_training=False)

    with torch.no_grad():
        for part in range(2):
            slices.forward(0, part, values(part, 2, 2, WIDTH))
    taken = weakref.ref(layer.seen.pop())
    gc.collect()

    assert taken() is None
    assert slices.carried[4, 0][0].value is not None


def test_the_value_goes_when_a_newer_one_is_left_and_the_gradients_when_they_are_used():
    slices = Slices(mixing())
    for part in range(NUM_SLICES):
        slices.forward(0, part, values(part, 2, 2, WIDTH))
    left = [slices.left(part) for part in range(NUM_SLICES - 1)]

    assert [each.value for each in left] == [None, None]
    slices.backward(0, 2, values(5, 2, 2, WIDTH))
    assert [len(each.gradients) for each in left] == [0, 1]


def test_a_layer_that_runs_again_in_its_backward_takes_what_it_took():
    layer = mixing()
    slices = Slices(layer)
    for part in range(2):
        slices.forward(0, part, values(part, 2, 2, WIDTH))

    def run_again(gradients):
        layer(values(1, 2, 2, WIDTH))

    slices.saved[0, 1].edges[0].node.register_prehook(run_again)
    slices.backward(0, 1, values(5, 2, 2, WIDTH))

    assert layer.seen[2] is layer.seen[1] is not None


def carrying(**parts):
    """Return a layer that carries for what it holds."""
    return Using(None, carry=Carry(), **parts)


def gru_by_itself():
    layer = nn.GRU(2, 2)
    layer.carry = Carry()
    return layer


LOOKING_BACK = {
    "held": (carrying(held=nn.GRU(2, 2)), False),
    "held in a list": (carrying(held=nn.ModuleList([nn.ModuleDict({"a": nn.GRU(2, 2)})])), False),
    "by itself": (gru_by_itself(), False),
    "beside": (nn.Sequential(carrying(held=nn.Linear(2, 2)), nn.GRU(2, 2)), True),
    # Its attention is called by a module that carries nothing.
    "further down": (carrying(held=nn.TransformerEncoderLayer(2, 1)), True),
}


@pytest.mark.parametrize("place", LOOKING_BACK)
def test_who_calls_a_layer_that_looks_back_may_carry_for_it(place):
    layer, is_refused = LOOKING_BACK[place]
    text = r"layer 'a' \((GRU|MultiheadAttention)\) looks back .* in a ps.Carry, or use a schedule with 1 slice"

    with pytest.raises(ConfigError, match=text) if is_refused else nullcontext():
        refuse_layers_that_look_back(
            [Stage(0, {"0": nn.Linear(2, 2), "a": layer})], (nn.RNNBase, nn.MultiheadAttention)
        )
