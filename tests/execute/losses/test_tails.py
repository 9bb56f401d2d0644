"""A last layer says whether a loss may apply it to some positions, and a loss whether it does."""

from functools import partial

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.execute.losses.tails import TailedOutput, as_positions, reported_outputs, tail_of, takes_tail, unwrapped
from tests.support.local_pipelines import values


class Sum(nn.Linear):
    """A linear layer that may do something else in its forward."""


class Said(nn.Module):
    def tail(self, hidden):
        return hidden + 1


def test_a_plain_linear_layer_is_a_tail_and_others_that_say_so():
    linear, said = nn.Linear(2, 3), Said()

    assert tail_of(linear) is linear
    assert tail_of(said)(1) == 2
    assert tail_of(Sum(2, 3)) is None
    assert tail_of(nn.Sequential(linear)) is None


def test_a_loss_says_that_it_takes_the_tail_also_behind_a_partial():
    loss = ps.losses.chunked_cross_entropy

    assert unwrapped(partial(partial(loss, chunk=2), shift=True)) is loss
    assert takes_tail(loss)
    assert takes_tail(partial(loss, chunk=2))
    assert not takes_tail(nn.functional.cross_entropy)
    assert not takes_tail(None)


@pytest.mark.parametrize("shape", [(2, 3), (6,), (1, 2, 3)])
def test_outputs_have_the_shape_that_the_last_layer_gives_them(shape):
    layer, hidden = nn.Linear(4, 5), values(1, *shape, 4)
    output = TailedOutput(hidden, layer)

    assert as_positions(hidden).shape == (1, 6, 4)
    torch.testing.assert_close(output.outputs(), layer(hidden))
    assert reported_outputs(output).grad_fn is None
    assert reported_outputs(hidden) is hidden
