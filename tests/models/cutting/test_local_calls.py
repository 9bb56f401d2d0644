"""What a submodule changes besides what it returns is refused, by the names of the module and the value."""

import pytest
import torch
from torch import nn

from penstock.errors import PenstockError
from penstock.models.cutting.local_calls import call_module
from penstock.models.cutting.routes import Routes


class Block(nn.Module):
    calls = 0

    def forward(self, hidden, seen=None, change=None):
        if change is not None:
            change(self, seen)
        return hidden


ROUTES = Routes([], frozenset(), {}, {}, {}, {"blocks.0": {"calls"}})


def call(seen, change=None):
    return call_module(Block(), "blocks.0", "__call__", (torch.ones(2), seen), {"change": change}, ROUTES)


@pytest.mark.parametrize(
    ("seen", "change", "words"),
    [
        ([], lambda block, seen: seen.append(1), r"changes its argument 'seen' \(list\).*AuxiliaryLoss"),
        ({}, lambda block, seen: seen.update(a=1), r"changes its argument 'seen' \(dict\)"),
        (torch.ones(2), lambda block, seen: seen.add_(1), r"changes its argument 'seen' \(Tensor\)"),
        (None, lambda block, seen: setattr(block, "calls", 1), "'blocks.0' changes its attribute 'calls'"),
    ],
)
def test_a_change_is_refused(seen, change, words):
    with pytest.raises(PenstockError, match=words):
        call(seen, change)


def test_a_call_that_changes_nothing_returns_what_the_module_does():
    assert call([1, {"a": 2}]).sum() == 2


def test_a_cache_is_refused_with_the_way_out():
    class DynamicCache:
        def __init__(self):
            self.keys = []

    with pytest.raises(PenstockError, match="use_cache=False"):
        call(DynamicCache(), lambda block, cache: cache.keys.append(1))
