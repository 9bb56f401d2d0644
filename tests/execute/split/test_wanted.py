"""The backward of a custom function gets the right answers, in and out of a split backward."""

import pytest
import torch

import penstock as ps
from penstock.errors import PipelineError
from penstock.execute.split.wanted import BackwardHalf, asks, want
from tests.support.using import function_of


def function():
    """One that has not run yet, and what it was answered."""
    seen = []

    def backward(ctx, gradient):
        seen.append((ps.wants_input_gradient(ctx), ps.wants_weight_gradient(ctx)))
        return gradient * 2

    return function_of(lambda ctx, hidden: hidden * 2, backward), seen


@pytest.mark.parametrize(
    ("part", "expected"), [(BackwardHalf.INPUT, (True, False)), (BackwardHalf.WEIGHT, (False, True))]
)
def test_each_part_wants_its_half(part, expected):
    doubled, seen = function()
    output = doubled.apply(torch.ones(2, requires_grad=True))
    want(output.grad_fn, part)

    output.sum().backward()

    assert seen == [expected]


def test_nothing_is_wanted_where_nothing_needs_a_gradient():
    doubled, _ = function()
    ctx = doubled.apply(torch.ones(2, requires_grad=True)).grad_fn
    ctx.needs_input_grad = (False,)

    assert not ps.wants_input_gradient(ctx)
    assert not ps.wants_weight_gradient(ctx)


def test_a_function_asks_once_its_backward_has():
    doubled, _ = function()

    class Other(doubled):
        """Inherits the backward; its own calls tell."""

    output = doubled.apply(torch.ones(2, requires_grad=True))
    before = asks(doubled)
    output.sum().backward()

    assert (before, asks(doubled), asks(Other)) == (False, True, False)


@pytest.mark.parametrize("ask", [ps.wants_input_gradient, ps.wants_weight_gradient])
def test_what_is_no_context_is_named(ask):
    with pytest.raises(PipelineError, match=rf"{ask.__name__}: expected the ctx .* got int; call it within backward"):
        ask(3)
