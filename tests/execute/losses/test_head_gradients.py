"""The gradient of a weight that several products share is one sum, which the last of their backwards hands over."""

import torch
from torch import nn
from torch.nn import functional as F

from penstock.execute.losses.head_gradients import GradientSum, HeadProducts, count_products
from tests.support.local_pipelines import values


def products_of(weight, bias, parts):
    products = HeadProducts()
    with products:
        results = [F.linear(part, weight, bias) for part in parts]
    return results


def test_the_gradients_of_products_are_those_of_autograd_and_the_weight_gets_one():
    weight, bias = (nn.Parameter(values(seed, *shape)) for seed, shape in ((1, (5, 4)), (2, (5,))))
    parts = [values(seed, 2, 3, 4).requires_grad_() for seed in (3, 4, 5)]
    handed_over = []
    weight.register_hook(handed_over.append)

    results = torch.cat(products_of(weight, bias, parts))
    count_products(results, parts[0])
    results.square().sum().backward()
    found = [weight.grad.clone(), bias.grad.clone(), *(part.grad.clone() for part in parts)]
    for tensor in (weight, bias, *parts):
        tensor.grad = None
    torch.cat([F.linear(part, weight, bias) for part in parts]).square().sum().backward()

    assert len(handed_over) == 2
    for gradient, tensor in zip(found, (weight, bias, *parts), strict=True):
        torch.testing.assert_close(gradient, tensor.grad)


def test_products_that_a_tail_detaches_do_not_hold_back_the_gradient():
    weight = nn.Parameter(values(1, 4, 4))
    hidden = values(2, 3, 4).requires_grad_()
    with HeadProducts():
        results = F.linear(hidden, weight) / F.linear(torch.eye(4), weight).norm().detach()

    count_products(results, hidden)
    results.square().sum().backward()

    found, weight.grad = weight.grad, None
    (hidden @ weight.T / weight.detach().norm()).square().sum().backward()
    torch.testing.assert_close(found, weight.grad)


def test_a_sum_is_handed_over_once_and_begins_anew():
    gradient_sum = GradientSum(num_products=2)
    ones = torch.ones(1, 1)

    found = [gradient_sum.add(ones, ones * factor) for factor in (1, 2, 3, 4)]

    assert found == [None, torch.tensor([[3.0]]), None, torch.tensor([[7.0]])]
    assert gradient_sum.total is None


def test_products_that_are_not_those_of_a_trained_parameter_stay_torchs_own():
    trained, frozen = nn.Parameter(values(1, 5, 4)), nn.Parameter(values(1, 5, 4), requires_grad=False)
    inputs = values(2, 3, 4).requires_grad_()

    def name_of(weight, part=inputs):
        return type(products_of(weight, None, [part])[0].grad_fn).__name__

    assert name_of(trained) == "_HeadProductBackward"
    assert name_of(frozen) != "_HeadProductBackward"
    assert name_of(trained * 2) != "_HeadProductBackward"
    with torch.autocast("cpu", torch.bfloat16):
        assert name_of(trained) != "_HeadProductBackward"
    with torch.no_grad():
        assert products_of(trained, None, [inputs])[0].grad_fn is None
