"""Points are sorted by a run without values."""

import torch
from torch import nn

from penstock.models.cutting.cut import ByName
from penstock.models.cutting.entry import PartCall
from penstock.models.cutting.order import in_order_of_calls
from penstock.models.cutting.points import cut_model


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.words, self.head = nn.LayerNorm(4), nn.Embedding(5, 4), nn.Linear(4, 5)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.unused, self.late = nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)

    def forward(self, words):
        hidden = self.words(words)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.late(self.norm(hidden)))


class Twice(Model):
    def forward(self, words):
        return self.norm(super().forward(words)[:, :4])


class Broken(Model):
    def forward(self, words):
        raise IndexError


def ordered(model):
    batch = PartCall((), {"words": torch.arange(3)}, True)
    return in_order_of_calls(model, cut_model(model, ["blocks.*"]), "blocks.", None, ByName(model), batch)


def test_points_are_sorted_by_their_calls_and_what_is_never_called_begins():
    cut = ordered(Model())

    assert cut.points == ("blocks.0", "blocks.1", "norm", "late", "head")
    assert cut.begin_modules == ("words", "unused")


def test_a_forward_that_raises_or_calls_one_twice_leaves_the_cut_as_it_is():
    assert ordered(Broken()) == cut_model(Model(), ["blocks.*"])
    assert ordered(Twice()) == cut_model(Model(), ["blocks.*"])
