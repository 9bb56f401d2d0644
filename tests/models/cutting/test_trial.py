"""A run without values finds what each part needs, or says what no part could have."""

import pytest
import torch
from torch import nn

from penstock.errors import PenstockError
from penstock.models.cutting.cut import cut
from penstock.models.cutting.entry import PartCall

WORDS = torch.arange(5)


class Block(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, hidden, *further):
        return super().forward(hidden), hidden.mean(-1, keepdim=True)


class Model(nn.Module):
    """Each block also returns a mean; the forward around them is `between`."""

    def __init__(self):
        super().__init__()
        self.words, self.place = nn.Embedding(5, 4), nn.Parameter(torch.randn(4))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 5)

    def forward(self, words):
        hidden = first = self.words(words)
        mean = None
        for number, block in enumerate(self.blocks):
            hidden, mean = self.between(block, number, hidden, mean, first)
        return self.head(self.end(hidden, first))

    def between(self, block, number, hidden, mean, first):
        return block(hidden)

    def end(self, hidden, first):
        return hidden


class Residual(Model):
    def end(self, hidden, first):
        return hidden + first


class Handed(Model):
    def between(self, block, number, hidden, mean, first):
        hidden, new_mean = block(hidden, mean)
        return hidden, new_mean if mean is None else mean


class Placed(Model):
    def end(self, hidden, first):
        return hidden + self.place


class Around(Model):
    """Adds what a block returns to what it was given: the input of each part is a leaf of its own."""

    def between(self, block, number, hidden, mean, first):
        return hidden + block(hidden)[0], mean


class Skipping(Around):
    """Uses the input of the second block behind the last one."""

    def between(self, block, number, hidden, mean, first):
        mean = hidden if number == 1 else mean
        return super().between(block, number, hidden, mean, first)[0], mean

    def forward(self, words):
        hidden, kept = self.words(words), None
        for number, block in enumerate(self.blocks):
            hidden, kept = self.between(block, number, hidden, kept, None)
        return self.head(hidden) + kept.sum()


class Swapped(Model):
    def forward(self, words):
        hidden = self.words(words)
        for number in (0, 2, 1):
            hidden, _ = self.blocks[number](hidden)
        return self.head(hidden)


class Twice(Model):
    def end(self, hidden, first):
        return self.blocks[2](hidden)[0]


class Late(Model):
    def end(self, hidden, first):
        return hidden + self.words(torch.arange(5))


class Short(Model):
    def forward(self, words):
        return self.blocks[0](self.words(words))[0]


class Reaching(Model):
    def end(self, hidden, first):
        return hidden + self.head.weight.sum()


class Writing(Model):
    def end(self, hidden, first):
        self.blocks[0].scale = 2
        return hidden


def routes_of(kind):
    forward = cut(kind(), ["blocks.*"])[0]._forward
    return forward.trials.routes(PartCall((), {"words": WORDS}, True), torch.device("cpu"))


@pytest.mark.parametrize(
    ("kind", "carried"),
    [
        (Model, [(), (), (), ()]),
        (Residual, [(), ("words#0.0",), ("words#0.0",), ()]),
        (Handed, [(), ("blocks.0#0.1",), ("blocks.0#0.1",), ()]),
        (Placed, [("place",), ("place",), ("place",), ()]),
        (Around, [(), (), (), ()]),
        (Skipping, [(), (), ("blocks.1#input.0",), ("blocks.1#input.0",)]),
    ],
)
def test_what_later_code_needs_is_carried_to_it_and_no_further(kind, carried):
    routes = routes_of(kind)

    assert [point.carried for point in routes.points] == carried
    short = {"blocks.0", "blocks.1", "blocks.2"} if kind in (Model, Handed) else {"blocks.0", "blocks.1"}
    assert routes.short == (set() if issubclass(kind, Around) else short)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Swapped, r"calls 'blocks.2' where 'blocks.1' was expected, which it leaves out.*layer drop"),
        (Twice, r"calls 'blocks.2' a second time"),
        (Late, r"calls 'words' behind 'blocks.2', though it is defined before; name it as"),
        (Short, r"has ended and has not called 'blocks.1'; give the points"),
        (Reaching, r"needs 'head.weight' behind 'blocks.2', where no layer has it yet"),
        (Writing, r"sets 'scale' of 'blocks.0' behind the code of its stage"),
    ],
)
def test_a_forward_that_parts_cannot_run_is_refused_by_names(kind, words):
    with pytest.raises(PenstockError, match=words):
        routes_of(kind)
