"""A carry forwards what was put in a slice, and does nothing where sequences are whole."""

import pytest
import torch
from torch import nn

from penstock.errors import PenstockError
from penstock.models import Carry


class RunningSum(nn.Module):
    """The example of `Carry`."""

    def __init__(self):
        super().__init__()
        self.carry = Carry()

    def forward(self, features):
        before = self.carry.get()
        sums = features.cumsum(1) if before is None else before + features.cumsum(1)
        self.carry.put(sums[:, -1:])
        return sums


def run_slice(layer, part, before, *, keeps=True):
    layer.carry.begin_slice(before, keeps=keeps)
    output = layer(part)
    return output, layer.carry.end_slice()


def test_where_sequences_are_whole_there_is_nothing_before_and_nothing_is_kept():
    layer, features = RunningSum(), torch.randn(2, 5, 3)

    for _ in range(2):  # twice is once per sequence
        assert torch.equal(layer(features), features.cumsum(1))

    assert layer.carry.get() is None


def test_what_a_slice_puts_the_next_one_gets():
    layer, features = RunningSum(), torch.randn(2, 5, 3)

    first, left = run_slice(layer, features[:, :2], None)
    second, _ = run_slice(layer, features[:, 2:], left)

    torch.testing.assert_close(torch.cat([first, second], 1), features.cumsum(1))
    assert torch.equal(left, first[:, -1:])


def test_a_slice_that_keeps_nothing_may_put_again_and_again():
    carry = Carry()
    carry.begin_slice("before", keeps=False)

    carry.put("one")
    carry.put("two")

    assert carry.get() == "before"
    assert carry.end_slice() is None


def test_a_second_value_in_one_slice_is_refused():
    carry = Carry()
    carry.begin_slice(None, keeps=True)
    carry.put(1)

    with pytest.raises(PenstockError, match=r"put into twice in one slice; .* a Carry for each use"):
        carry.put(2)


def test_a_value_without_gradients_is_refused_only_where_gradients_are_recorded():
    carry = Carry()
    with torch.no_grad():
        carry.begin_slice(None, keeps=True)
        carry.put(1)
    assert carry.end_slice() == 1

    carry.begin_slice(None, keeps=True)
    with torch.no_grad(), pytest.raises(PenstockError, match="put outside of no_grad"):
        carry.put(1)


def test_it_adds_nothing_to_what_a_layer_has_and_saves():
    layer = RunningSum()
    layer.carry.begin_slice(nn.Parameter(torch.ones(1)), keeps=True)
    layer.carry.put((nn.Parameter(torch.ones(1)), nn.Linear(2, 2)))

    assert list(layer.parameters()) == []
    assert layer.state_dict() == {}
    assert [type(module) for module in layer.modules()] == [RunningSum, Carry]
