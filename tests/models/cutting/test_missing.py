"""What is computed from values that are not there is found, also where it is a mask, a number or a buffer."""

import pytest
import torch
from torch import nn

from penstock.errors import PenstockError
from penstock.models.cutting.cut import cut
from penstock.models.cutting.missing import Missing
from tests.models.cutting.test_part import run

ROWS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
KEPT = torch.arange(6) % 3 != 0


@pytest.mark.parametrize(
    ("compute", "lacks"),
    [
        (lambda known, missing: missing.sum(-1) > 0, True),
        (lambda known, missing: missing[:, 0].argmax(), True),
        (lambda known, missing: known.clone().copy_(missing), True),
        (lambda known, missing: missing.view(2, 12).T, True),
        (lambda known, missing: torch.zeros_like(missing), False),
        (lambda known, missing: missing.new_ones(3) + known.sum(), False),
        (lambda known, missing: torch.arange(missing.shape[0]) > 2, False),
        (lambda known, missing: known.sum(), False),
    ],
)
def test_what_is_made_of_missing_values_lacks_values(compute, lacks):
    missing = torch.zeros(6, 4)
    with Missing() as mode:
        mode.mark(missing, "words")
        assert mode.origin_of(compute(ROWS, missing)) == ("words" if lacks else None)


def test_a_python_value_of_a_missing_one_is_refused():
    with Missing() as mode:
        mode.mark(ROWS, "words")
        with pytest.raises(PenstockError, match=r"decides by the value of a tensor.*\(__bool__\), 'words'"):
            bool((ROWS > 0).any())
        assert not bool((torch.zeros(3) > 0).any())


def test_what_runs_in_a_pause_is_not_followed():
    with Missing() as mode:
        mode.mark(ROWS, "words")
        with mode.paused():
            assert mode.origin_of(ROWS * 2) is None
        assert mode.origin_of(ROWS * 2) == "words"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, hidden, kept=None):
        hidden = hidden + self.inner(hidden).tanh()
        return hidden if kept is None else hidden * kept[:, None]


class Pair(Block):
    def forward(self, hidden, kept=None):
        return super().forward(hidden, kept), kept


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", KEPT.clone())

    def forward(self):
        return self.kept


class Model(nn.Module):
    block = Block

    def __init__(self):
        super().__init__()
        self.words, self.kept = nn.Linear(4, 4), Kept()
        self.register_buffer("mean", torch.zeros(4))
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, rows, kept=None):
        hidden = self.words(rows)
        kept = self.begin(hidden, kept)
        for block in self.blocks:
            hidden, kept = self.call(block, hidden, kept)
        return self.head(self.end(hidden))

    def begin(self, hidden, kept):
        return kept

    def call(self, block, hidden, kept):
        return block(hidden, kept), kept

    def end(self, hidden):
        return hidden


class Compared(Model):
    def begin(self, hidden, kept):
        return hidden.sum(-1) > 0


class FromBuffer(Model):
    def begin(self, hidden, kept):
        return self.kept()


class Deciding(Model):
    def begin(self, hidden, kept):
        return KEPT if hidden.mean() > 0 else None


class OwnBuffer(Model):
    def end(self, hidden):
        return hidden + self.mean


class Late(Model):
    def end(self, hidden):
        self.mean.copy_(hidden.detach().mean(0))
        return hidden


class Early(Model):
    def begin(self, hidden, kept):
        self.mean = hidden.detach().mean(0)
        return kept


class Passing(Model):
    block = Pair

    def call(self, block, hidden, kept):
        return block(hidden, kept)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Compared, "from 'blocks.0' to 'blocks.1' depends on what a layer of another stage"),
        (FromBuffer, "from 'blocks.0' to 'blocks.1' depends on what a layer of another stage"),
        (Deciding, "decides by the value of a tensor"),
        (OwnBuffer, r"from 'blocks.2' to 'head' depends .* or holds.*persistent=False"),
        (Late, "changes the buffer 'mean' behind its first point"),
    ],
)
def test_a_forward_that_needs_more_than_the_batch_and_its_first_argument_is_refused(kind, words):
    model = kind()
    with pytest.raises(PenstockError, match=words):
        run(cut(model, ["blocks.*"]), rows=ROWS)


def test_what_a_block_was_given_and_returns_is_there():
    model = Passing()
    parts = cut(model, ["blocks.*"])
    for kept in (KEPT, ~KEPT):
        assert torch.equal(run(parts, rows=ROWS, kept=kept), model(ROWS, kept))


def test_a_buffer_that_the_forward_sets_before_the_first_point_is_that_of_the_first_layer():
    model = Early()
    parts = cut(model, ["blocks.*"])
    run(parts, rows=ROWS)

    assert torch.equal(parts[0].state_dict()["mean"], model.words(ROWS).mean(0))
