"""A search finds the products whose weights may wait, and everything else that a backward must reach."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from penstock.execute.split.graph_search import search
from tests.support.local_pipelines import WIDTH, values


def weight():
    return nn.Parameter(values(2, WIDTH, WIDTH))


def hidden():
    return values(1, 3, WIDTH).requires_grad_()


def survey(output, *whole):
    return search([get_gradient_edge(output)], frozenset(map(id, whole)))


def waiting(found):
    return {id(parameter) for product in found.deferred_nodes for parameter in product.parameters}


def ids(tensors):
    return {id(tensor) for tensor in tensors}


def test_matrices_wait_and_inputs_and_vectors_do_not():
    layers, x = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)), hidden()

    found = survey(layers(x))

    matrices = [parameter for parameter in layers.parameters() if parameter.dim() > 1]
    assert waiting(found) == ids(matrices)
    assert ids(found.immediate.values()) == ids([x, *layers.parameters()]) - ids(matrices)
    assert found.sizes == {id(matrices[0]): 3 * WIDTH * WIDTH, id(matrices[1]): 3 * WIDTH * 2}


@pytest.mark.parametrize(
    "use",
    [
        lambda x, w: (x @ w) * w[0],
        lambda x, w: (x @ w) + w.t()[:3],
        lambda x, w: w[:3] @ (x @ w).t(),
        lambda x, w: x @ (w * x.mean()),
        lambda x, w: x @ x.t() @ x * w[:3],
    ],
)
def test_a_weight_that_something_else_leads_to_does_not_wait(use):
    x, w = hidden(), weight()

    found = survey(use(x, w))

    assert found.deferred_nodes == []
    assert ids(found.immediate.values()) == ids([x, w])


def test_nor_does_what_shares_a_product_with_it():
    x, first, second, third = hidden(), weight(), weight(), weight()

    found = survey(x @ (first + second) @ (second + third) @ weight() + third[0])

    assert len(found.deferred_nodes) == 1
    assert ids(found.immediate.values()) == ids([x, first, second, third])


def in_many_steps(weight):
    for _ in range(5000):
        weight = weight + 1
    return weight


@pytest.mark.parametrize(
    "make", [torch.tanh, lambda w: w.bfloat16().float(), lambda w: w.t() + 1, lambda w: w @ w, in_many_steps]
)
def test_weights_may_be_made_of_parameters(make):
    x, w = hidden(), weight()

    found = survey(x @ make(w))

    assert waiting(found) == ids([w])
    assert found.sizes == {id(w): float("inf")}


def test_what_is_to_stay_whole_does_not_wait_and_its_size_is_told():
    x, first, second = hidden(), weight(), weight()

    found = survey(x @ first @ second, first)

    assert waiting(found) == ids([second])
    assert ids(found.immediate.values()) == ids([x, first])
    assert found.sizes.keys() == ids([first, second])


def test_a_weight_used_twice_has_both_sizes():
    x, w = hidden(), weight()

    found = survey(x @ w @ w)

    assert len(found.deferred_nodes) == 2
    assert found.sizes == {id(w): 2 * 3 * WIDTH * WIDTH}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_is_told_where_it_is_reentrant_and_nothing_waits_beside_it(use_reentrant):
    within, behind = weight(), weight()

    found = survey(checkpoint(lambda x: x @ within, hidden(), use_reentrant=use_reentrant) @ behind)

    assert found.is_opaque == use_reentrant
    assert waiting(found) == (set() if use_reentrant else ids([within, behind]))
