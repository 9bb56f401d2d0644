"""Points are sorted by a run without values."""

import torch
from torch import nn

from penstock.models.cutting.cut import ByName
from penstock.models.cutting.entry import PartCall
from penstock.models.cutting.frame import Template
from penstock.models.cutting.order import in_order_of_calls, order_of_calls, with_points
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


class Towers(nn.Module):
    """Two lists of blocks, of which the later one is called first, and a list that is called between its blocks."""

    def __init__(self):
        super().__init__()
        self.language, self.vision, self.mergers = (
            nn.ModuleList(nn.Linear(4, 4) for _ in range(number)) for number in (2, 3, 1)
        )
        self.bridge = nn.Linear(4, 4)

    def forward(self, pixels):
        first = self.vision[0](pixels)
        hidden = self.vision[2](self.vision[1](self.mergers[0](first)))
        hidden = self.bridge(hidden)
        for block in self.language:
            hidden = block(hidden)
        return hidden


class Broken(Model):
    def forward(self, words):
        self.words(words)
        raise IndexError


class Twice(Model):
    def forward(self, words):
        return self.blocks[0](super().forward(words)[:, :4])


BLOCKS = ("blocks.0", "blocks.1")


def tried(model, batch, patterns=("blocks.*",), blocks=BLOCKS):
    cut = cut_model(model, patterns)
    template = Template(model, with_points(cut, blocks))
    return cut, order_of_calls(template, ByName(model), PartCall((), batch, True))


def test_points_are_sorted_by_their_calls_and_what_is_never_called_begins():
    cut, order = tried(Model(), {"words": torch.arange(3)})

    ordered = in_order_of_calls(cut, BLOCKS, order)

    assert order.error is None
    assert order.repeated_names == set()
    assert ordered.points == ("blocks.0", "blocks.1", "norm", "late", "head")
    assert ordered.begin_modules == ("words", "unused")


def test_blocks_of_several_lists_are_found_in_the_order_of_their_calls_with_what_they_were_given():
    patterns = ("language.*", "vision.*", "mergers.*")
    blocks = ["language.0", "language.1", "vision.0", "vision.1", "vision.2", "mergers.0"]
    cut, order = tried(Towers(), {"pixels": torch.zeros(5, 4)}, patterns, blocks)

    called = ["vision.0", "mergers.0", "vision.1", "vision.2", "bridge", "language.0", "language.1"]
    assert order.names == called
    assert [call.args[0].shape for call in order.calls] == [(5, 4)] * 7
    assert in_order_of_calls(cut, blocks, order).points == tuple(called)


def test_what_ends_a_run_and_what_is_called_twice_is_kept():
    _, broken = tried(Broken(), {"words": torch.arange(3)})
    _, twice = tried(Twice(), {"words": torch.arange(3)})

    assert type(broken.error) is IndexError
    assert broken.names == ["words"]
    assert twice.repeated_names == {"blocks.0"}
