"""Which nodes make weights, and how long their backward takes."""

import math

import pytest
import torch
from torch import nn

from penstock.execute.split.weight_graph import WeightGraph, makes_weights, may_make_weights, num_multiplications
from tests.support.local_pipelines import WIDTH, values
from tests.support.using import function_of

Own = function_of(lambda ctx, *tensors: sum(tensors), lambda ctx, gradient: (gradient, None))


def weight(*shape):
    return nn.Parameter(values(2, *(shape or (WIDTH, WIDTH))))


@pytest.mark.parametrize(
    ("make", "is_branch"),
    [
        (lambda w: torch.tanh(w), True),
        (lambda w: w * 2 + 1, True),
        (lambda w: w * values(1, WIDTH, WIDTH), True),
        (lambda w: torch.tanh(w @ w.t()), True),
        (lambda w: w / w.norm(), True),
        (lambda w: Own.apply(w), True),
        (lambda w: Own.apply(w, values(1, WIDTH, WIDTH)), False),
        (lambda w: w[0] + values(1, 3, WIDTH), False),
        (lambda w: values(1, WIDTH, WIDTH) @ w, False),
        (lambda w: nn.functional.linear(values(1, WIDTH, WIDTH), w, weight(WIDTH)), False),
        (lambda w: nn.functional.embedding(torch.tensor([0, 1]), w) * 2, False),
        (lambda w: torch.tanh(w[torch.tensor([0, 1])]), False),
        (lambda w: w + values(1, WIDTH, WIDTH).requires_grad_(), False),
        (lambda w: nn.functional.layer_norm(values(1, 3, WIDTH), (WIDTH,), weight(WIDTH), weight(WIDTH)), False),
    ],
)
def test_a_branch_meets_no_data(make, is_branch):
    found = WeightGraph().origin_behind([make(weight()).grad_fn], makes_weights)

    assert (found is not None) == is_branch


def test_behind_a_product_constants_may_be_of_any_shape_but_those_of_a_function_that_changes_that_of_its_weight():
    joined = torch.cat([values(1, 2, WIDTH), weight()])
    same, other = Own.apply(weight(), values(1, WIDTH, WIDTH)), Own.apply(weight(WIDTH), values(1, 3, WIDTH))

    assert WeightGraph().origin_behind([joined.grad_fn]) is not None
    assert WeightGraph().origin_behind([joined.grad_fn], makes_weights) is None
    assert WeightGraph().origin_behind([same.grad_fn]) is not None
    assert WeightGraph().origin_behind([other.grad_fn]) is None


def test_what_leads_elsewhere_is_not_searched_again():
    hidden, w = values(1, WIDTH, WIDTH).requires_grad_(), weight()
    inner = torch.tanh(w)
    outer = (inner + hidden).relu()
    graph, seen = WeightGraph(), []

    def rule(node):
        seen.append(node)
        return may_make_weights(node)

    assert graph.origin_behind([outer.grad_fn], rule) is None
    assert graph.origin_behind([inner.grad_fn], rule) is not None
    seen.clear()
    assert graph.origin_behind([(last := outer * 2).grad_fn], rule) is None
    assert seen == [last.grad_fn]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda w: w.t()[0].expand(4, -1), 0),
        (torch.tanh, 32 * WIDTH**2),
        (torch.sum, 32 * WIDTH**2),
        (lambda w: torch.tanh(w[0]), 32 * WIDTH),
        (lambda w: torch.tanh(w @ w), math.inf),
        (lambda w: Own.apply(w.t()), math.inf),
    ],
)
def test_the_work_of_a_branch_is_that_of_its_elements(make, expected):
    _, nodes = WeightGraph().origin_behind([make(weight()).grad_fn])

    assert num_multiplications(nodes) == expected
