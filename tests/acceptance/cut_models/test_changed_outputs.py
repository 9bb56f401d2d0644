"""Containers that submodules return, which the forward changes: each stage changes its own."""

import pytest
import torch
from torch import nn

from tests.support.cut_cases import WIDTH, Block, Chain, assert_right

on_both = pytest.mark.parametrize("num_ranks", [1, 2])


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows):
        hidden = self.inner(rows)
        return {"hidden": hidden, "mask": hidden.sigmoid()}


class Moved(Chain):
    """An item goes to the end of a dict."""

    def build(self):
        self.begin = Tower()

    def forward(self, rows):
        output = self.begin(rows)
        output["hidden"] = output.pop("hidden") * 2
        hidden = output["hidden"]
        for block in self.blocks:
            hidden = block(hidden).tanh() * output["mask"]
        return self.head(hidden)


class Split(Moved):
    """As Qwen3-VL splits the features of a batch of images."""

    def forward(self, rows):
        output = self.begin(rows)
        output["mask"] = torch.split(output["mask"], 1)
        hidden = output["hidden"]
        for block in self.blocks:
            hidden = block(hidden, torch.cat(output["mask"]))
        return self.head(hidden)


class Popped(Chain):
    """Of what blocks return."""

    class block(Block):  # noqa: N801 - the attribute of Chain
        def forward(self, hidden, factor=1.0):
            hidden = super().forward(hidden, factor)
            return {"hidden": hidden, "mask": hidden.sigmoid()}

    def call(self, block, number, hidden):
        output = block(hidden)
        mask = output.pop("mask")
        return output["hidden"] * mask


@on_both
@pytest.mark.parametrize("kind", [Moved, Split, Popped])
def test_a_container_that_a_submodule_returns_may_be_changed(kind, num_ranks):
    assert_right(kind, num_ranks=num_ranks)
