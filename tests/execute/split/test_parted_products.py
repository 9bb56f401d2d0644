"""A product that is run apart from its weights hands them to the weight part, in the stage's own backward alone."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from penstock.execute.split.parted_products import Parting
from tests.local_pipelines import WIDTH, settle, values


def layer():
    return settle(nn.Linear(WIDTH, WIDTH), 1)


def run(module, hidden, *, is_in_backward=True, weights=None):
    """What a parting holds after a backward."""
    late = []
    parting = Parting(late, weights)
    with parting:
        output = module(hidden)
    parting.is_in_backward = is_in_backward
    torch.autograd.backward([get_gradient_edge(output)], [torch.ones_like(output)])
    return late


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_the_gradient_of_the_weight_waits(needs_gradient):
    module, other = layer(), layer()
    hidden = values(1, 3, WIDTH).requires_grad_(needs_gradient)

    (left,) = run(module, hidden)
    other(values(1, 3, WIDTH)).sum().backward()

    assert module.weight.grad is None
    assert torch.equal(module.bias.grad, other.bias.grad)
    assert left.parameters == left.roots == [module.weight]
    assert torch.equal(*left.finish(), other.weight.grad)


def test_a_backward_outside_the_input_part_leaves_nothing():
    assert run(layer(), values(1, 3, WIDTH).requires_grad_(), is_in_backward=False) == []


def test_products_of_other_weights_stay_whole():
    module = layer()

    assert run(module, values(1, 3, WIDTH).requires_grad_(), weights=frozenset()) == []
    assert module.weight.grad is not None


def test_an_output_that_takes_no_part_leaves_nothing():
    first, second = layer(), layer()
    hidden = values(1, 3, WIDTH).requires_grad_()

    def module(x):
        return torch.stack([first(x), second(x)])[0]

    late = run(module, hidden)

    assert [use.parameters for use in late][-1:] == [[first.weight]]


def test_without_gradients_it_is_the_function_itself():
    module = layer()

    with Parting([], None), torch.no_grad():
        output = module(values(1, 3, WIDTH))

    assert output.grad_fn is None


def test_the_output_may_be_changed_in_place():
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU(inplace=True))

    (left,) = run(module, values(1, 2, 3, WIDTH))

    assert left.roots == [module[0].weight]
