"""Modules are watched while a stage runs, and only those that hold the weights in question."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from penstock.execute.split.parted_products import Parting
from penstock.execute.split.watched_layers import WatchedLayers, watching_all
from tests.local_pipelines import WIDTH, values


class Matrix(nn.Module):
    """A matrix without a layer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, hidden):
        return hidden @ self.weight


def parted(watch, module, weights):
    """Whether a module's output comes of a product run apart from its weights."""
    parting = Parting([], weights)
    with watch(parting):
        output = module(values(1, 2, WIDTH).requires_grad_())
    return output.grad_fn.name() == "PartedProductBackward"


@pytest.mark.parametrize("make", [lambda: nn.Linear(WIDTH, WIDTH), Matrix, lambda: nn.LazyLinear(WIDTH)])
def test_products_of_the_weights_in_question_are_parted(make):
    module = make()
    module(values(1, 2, WIDTH))
    weights = frozenset([id(module.weight)])

    assert parted(WatchedLayers([module], weights).watching, module, weights)
    assert parted(watching_all, module, weights)


def test_products_of_other_weights_are_not():
    module, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    weights = frozenset([id(other.weight)])

    assert not parted(WatchedLayers([module, other], weights).watching, module, weights)
    assert not parted(watching_all, module, weights)


def test_a_mode_finds_what_holders_do_not_show():
    module = weight_norm(nn.Linear(WIDTH, WIDTH, bias=False))

    assert parted(watching_all, module, None)


@pytest.mark.parametrize("own", [None, lambda hidden: hidden])
def test_forwards_are_given_back_even_when_one_fails(own):
    module = nn.Linear(WIDTH, WIDTH)
    if own is not None:
        module.forward = own
    watched = WatchedLayers([module], frozenset([id(module.weight)]))

    with pytest.raises(ZeroDivisionError), watched.watching(Parting([], None)):
        raise ZeroDivisionError

    assert module.__dict__.get("forward") is own


def test_a_forward_of_the_users_own_is_run():
    module = nn.Linear(WIDTH, WIDTH)
    module.forward = lambda hidden: hidden @ module.weight * 2
    hidden = values(1, 2, WIDTH)
    watched = WatchedLayers([module], frozenset([id(module.weight)]))

    with watched.watching(Parting([], None)):
        assert torch.equal(module(hidden), hidden @ module.weight * 2)
