"""A module with a backward of its own trains in a pipeline as autograd would, whole and split."""

import weakref

import pytest
import torch
from torch import nn

from penstock.errors import PipelineError
from penstock.moving.own_backward import add_gradient, own_backward
from penstock.pipeline import Pipeline
from tests.support.local_pipelines import (
    Outcome,
    block,
    difference,
    error_of,
    gradients_of,
    named,
    on_ranks,
    settle,
    square_loss,
    values,
)
from tests.support.reference import reference_step

WIDTH = 6


class ByHand(nn.Module):
    """tanh(features @ weight), forward and backward written out."""

    def __init__(self, seed):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH, dtype=torch.float64))
        settle(self, seed)

    def forward(self, features):
        assert not torch.is_grad_enabled()
        output = torch.tanh(features @ self.weight)
        return output, (features, output)

    def backward(self, gradient, context):
        features, output = context
        inner = gradient * (1 - output**2)
        add_gradient(self.weight, features.t() @ inner)
        return inner @ self.weight.t()


class ByAutograd(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.module = ByHand(seed)

    def forward(self, features):
        return torch.tanh(features @ self.module.weight)


def layers(by_hand):
    make = (lambda seed: own_backward(ByHand(seed))) if by_hand else ByAutograd
    return [make(1), block(2, torch.float64), make(3), make(4)]


def batch():
    return values(1, 8, WIDTH, dtype=torch.float64), values(2, 8, WIDTH, dtype=torch.float64)


@pytest.mark.feature("D6")
@pytest.mark.parametrize("schedule", ["zb-h1", "zbv", "interleaved-1f1b"])
def test_gradients_are_those_of_autograd_under_whole_and_split_schedules(schedule):
    inputs, target = batch()

    def case(transport):
        pipeline = Pipeline(layers(True), schedule, 4, square_loss, transport=transport)
        result = pipeline.step(inputs, target=target)
        outcome = Outcome(result, gradients_of(pipeline.named_parameters()))
        pipeline.close()
        return outcome

    outcomes = on_ranks(2, case)

    plain = layers(False)
    expected = reference_step(plain, (inputs,), {}, target, loss=square_loss, num_microbatches=4)
    assert difference(outcomes, (expected, gradients_of(named(plain))), tolerance=1e-12, loss_tolerance=1e-12) == []


def test_a_stage_that_computes_the_loss_itself_is_last():
    class Loss(nn.Module):
        def forward(self, features):
            return (features**2).mean(), features

        def backward(self, gradient, context):
            assert gradient.shape == ()
            return gradient * 2 * context / context.numel()

    inputs, _ = batch()

    def case(transport):
        pipeline = Pipeline(
            [ByAutograd(1), own_backward(Loss())], "1f1b", 4, lambda output, target: output, transport=transport
        )
        pipeline.step(inputs, target=torch.zeros(8))
        found = gradients_of(pipeline.named_parameters())
        pipeline.close()
        return found

    first, _ = on_ranks(2, case)

    plain = ByAutograd(1)
    reference_step([plain], (inputs,), {}, inputs, loss=lambda output, target: (output**2).mean(), num_microbatches=4)
    torch.testing.assert_close(first["0.module.weight"], plain.module.weight.grad, rtol=1e-12, atol=1e-12)


class Trees(nn.Module):
    """Dictionaries in and out, with a whole number and a mask among them."""

    def forward(self, values):
        left, right = values["left"], values["right"]
        output = {"product": left * right, "count": 7, "mask": left > 0}
        return output, (left, right)

    def backward(self, gradient, context):
        assert gradient["count"] is None
        _, right = context
        return {"left": gradient["product"] * right, "right": None}


def test_trees_and_what_needs_no_gradient_pass_through():
    left = values(1, 3).requires_grad_(True)
    right = values(2, 3)

    output = own_backward(Trees())({"left": left, "right": right})
    output["product"].sum().backward()

    assert output["count"] == 7
    assert output["mask"].dtype == torch.bool
    assert not output["mask"].requires_grad
    assert torch.equal(left.grad, right)


class Sum(nn.Module):
    def forward(self, first, second):
        return first + 2 * second, None

    def backward(self, gradient, context):
        return gradient, 2 * gradient


def test_several_inputs_get_a_gradient_each():
    first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)

    own_backward(Sum())(first, second).sum().backward()

    assert first.grad.tolist() == [1, 1]
    assert second.grad.tolist() == [2, 2]


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4, 2))

    def forward(self, tokens):
        return self.table[tokens], tokens

    def backward(self, gradient, context):
        add_gradient(self.table, torch.zeros_like(self.table).index_add(0, context, gradient))


def test_the_backward_runs_where_the_input_needs_no_gradient():
    lookup = own_backward(Lookup())

    lookup(torch.tensor([1, 1, 3])).sum().backward()

    assert lookup.module.table.grad[:, 0].tolist() == [0, 2, 0, 1]


def test_a_frozen_parameter_gets_no_gradient():
    lookup = own_backward(Lookup()).requires_grad_(False)

    lookup(torch.tensor([1])).sum().backward()

    assert lookup.module.table.grad is None


class Kept:
    """A context that can be watched."""


class Keeping(nn.Module):
    def forward(self, features):
        context = Kept()
        self.seen = weakref.ref(context)
        return features * 1, context

    def backward(self, gradient, context):
        return gradient


def test_the_context_is_let_go_after_the_backward_and_kept_by_no_evaluation():
    module = Keeping()
    output = own_backward(module)(torch.ones(2, requires_grad=True))
    assert module.seen() is not None

    output.sum().backward()
    assert module.seen() is None

    with torch.no_grad():
        output = own_backward(module)(torch.ones(2))
    assert module.seen() is None
    assert not output.requires_grad


def test_modules_that_are_none_of_this_kind_are_told():
    class NoPair(nn.Module):
        def forward(self, features):
            return features

        def backward(self, gradient, context):
            return gradient

    assert "Linear has no backward" in str(error_of(own_backward, nn.Linear(1, 1)))
    error = error_of(own_backward(NoPair()), torch.ones(1))
    assert isinstance(error, PipelineError)
    assert "returns a pair (output, context)" in str(error)
