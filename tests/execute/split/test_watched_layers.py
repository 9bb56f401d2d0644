"""Modules are watched while a stage runs, and only those that hold the weights in question."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from penstock.execute.split.watched_layers import WatchedLayers
from penstock.execute.split.weight_grad_mode import WeightGradMode
from tests.local_pipelines import WIDTH, values


class Matrix(nn.Module):
    """A matrix without a layer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, hidden):
        return hidden @ self.weight


class Derived(nn.Linear):
    """A layer of the user's with the forward of torch's."""


def own_forward():
    module = nn.Linear(WIDTH, WIDTH)
    module.forward = lambda hidden: hidden @ module.weight
    return module


def split(watch, module, weights, *shape):
    """Whether a module's output comes of a product run apart from its weights."""
    mode = WeightGradMode(weights)
    with watch(mode):
        output = module(values(1, *shape or (2, WIDTH)).requires_grad_())
    return output.grad_fn.name() == "SplitProductBackward"


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(WIDTH, WIDTH), lambda: Derived(WIDTH, WIDTH), lambda: nn.LazyLinear(WIDTH)]
)
def test_products_of_the_weights_in_question_are_split(make):
    module = make()
    module(values(1, 2, WIDTH))
    weights = frozenset([id(module.weight)])
    watched = WatchedLayers([module], weights)

    assert watched.is_complete
    assert split(watched.watching, module, weights)
    assert split(lambda mode: mode, module, weights)


@pytest.mark.parametrize("make", [Matrix, own_forward])
def test_a_forward_of_the_users_is_not_watched_by_itself(make):
    module = make()
    weights = frozenset([id(module.weight)])
    watched = WatchedLayers([module], weights)

    assert not watched.is_complete
    assert not split(watched.watching, module, weights)
    assert split(lambda mode: mode, module, weights)


def test_torchs_other_layers_are_watched_while_they_run():
    module = nn.Conv1d(2, 2, 1)
    weights = frozenset(map(id, module.parameters()))

    assert split(WatchedLayers([module], weights).watching, module, weights, 2, 2, WIDTH)


def test_products_of_other_weights_are_not():
    module, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    weights = frozenset([id(other.weight)])

    assert not split(WatchedLayers([module, other], weights).watching, module, weights)
    assert not split(lambda mode: mode, module, weights)


def test_a_mode_finds_what_holders_do_not_show():
    module = weight_norm(nn.Linear(WIDTH, WIDTH, bias=False))

    assert split(lambda mode: mode, module, frozenset(map(id, module.parameters())))


@pytest.mark.parametrize("own", [None, lambda hidden: hidden])
def test_forwards_are_given_back_even_when_one_fails(own):
    module = nn.Linear(WIDTH, WIDTH)
    if own is not None:
        module.forward = own
    watched = WatchedLayers([module], frozenset([id(module.weight)]))

    with pytest.raises(ZeroDivisionError), watched.watching(WeightGradMode(frozenset())):
        raise ZeroDivisionError

    assert module.__dict__.get("forward") is own


@pytest.mark.parametrize("is_watching", [True, False])
def test_a_forward_that_is_replaced_later_is_run_and_kept(is_watching):
    module = nn.Linear(WIDTH, WIDTH)
    watched = WatchedLayers([module], frozenset([id(module.weight)]))
    with watched.watching(WeightGradMode(frozenset())) if is_watching else nullcontext():
        module.forward = own = lambda hidden: hidden * 2
    hidden = values(1, 2, WIDTH)

    with watched.watching(WeightGradMode(frozenset())):
        assert torch.equal(module(hidden), hidden * 2)

    assert module.__dict__["forward"] is own
