"""State around the blocks of a cut model: right where a forward makes it anew, else refused by module and attribute."""

import pytest
import torch
from torch import nn

from tests.support.cut_cases import WIDTH, Block, Chain, Stateful, assert_right, assert_right_or_refused, batch

on_both = pytest.mark.parametrize("num_ranks", [1, 2])
NAMED = r"\bcalls\b"


class Number(Stateful):
    def build(self):
        self.calls = 0

    def advance(self, rows):
        self.calls += 1


class Unsaved(Stateful):
    """A buffer that is assigned anew."""

    def build(self):
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def advance(self, rows):
        self.calls = self.calls + 1


class UnsavedInPlace(Unsaved):
    def advance(self, rows):
        self.calls.add_(1)


class PlainTensor(Unsaved):
    """A tensor that is no buffer."""

    def build(self):
        self.calls = torch.zeros(())


class Average(Stateful):
    """A moving average of the batch, in Python numbers."""

    def build(self):
        self.calls = 0.0

    def advance(self, rows):
        self.calls = 0.9 * self.calls + 0.1 * rows.abs().mean().item()


class Listed(Stateful):
    def build(self):
        self.calls = []

    def advance(self, rows):
        self.calls.append(rows.shape[1])

    def factor(self):
        return len(self.calls)


class Unread(Listed):
    """A history that the model never reads: its owner does."""

    def factor(self):
        return 1


class Nested(Stateful):
    """A number in a list in a dict."""

    def build(self):
        self.calls = {"steps": [0]}

    def advance(self, rows):
        self.calls["steps"][0] += 1

    def factor(self):
        return self.calls["steps"][0]


class Counter:
    def __init__(self):
        self.number = 0


class OfAnObject(Stateful):
    def build(self):
        self.calls = Counter()

    def advance(self, rows):
        self.calls.number += 1

    def factor(self):
        return self.calls.number


class OfASet(Stateful):
    def build(self):
        self.calls = set()

    def advance(self, rows):
        self.calls.add(float(rows[0, 0, 0]))

    def factor(self):
        return len(self.calls)


class OfASubmodule(Stateful):
    """A module without parameters, beside the blocks."""

    def build(self):
        self.meter = nn.Identity()
        self.meter.calls = 0

    def advance(self, rows):
        self.meter.calls += 1

    def factor(self):
        return self.meter.calls


class Toggled(Stateful):
    """After two forwards all is as it was."""

    def build(self):
        self.calls = False

    def advance(self, rows):
        self.calls = not self.calls


STATES = [
    Number, Unsaved, UnsavedInPlace, PlainTensor, Average, Listed, Unread, Nested, OfAnObject, OfASet, OfASubmodule,
    Toggled,
]  # fmt: skip


@on_both
@pytest.mark.parametrize("kind", STATES)
def test_state_that_each_forward_advances_is_refused_by_its_name_or_advances_once(kind, num_ranks):
    assert_right_or_refused(kind, num_ranks=num_ranks, match=NAMED)


class Previous(Chain):
    """The hidden state of the forward before."""

    def build(self):
        self.calls = None

    def forward(self, rows):
        hidden = self.begin(rows)
        start = hidden.detach().mean()
        hidden = hidden if self.calls is None else hidden + self.calls
        for block in self.blocks:
            hidden = block(hidden)
        self.calls = start
        return self.head(hidden)


class Behind(Chain):
    """The value of a block, for a later forward and between the blocks."""

    def build(self):
        self.calls = 0.0

    def call(self, block, number, hidden):
        hidden = block(hidden) + self.calls
        if number == 1:
            self.calls = hidden.detach().mean()
        return hidden


class AtTheEnd(Chain):
    def build(self):
        self.calls = torch.zeros(())

    def forward(self, rows):
        output = super().forward(rows)
        self.calls = self.calls + output.detach().mean()
        return output + self.calls


class Kept(Chain):
    """Values that are kept for the owner alone."""

    def build(self):
        self.calls = None

    def call(self, block, number, hidden):
        if number == 2:
            self.calls = hidden
        return block(hidden)


@on_both
@pytest.mark.parametrize("kind", [Previous, Behind, AtTheEnd, Kept])
def test_values_that_a_forward_keeps_are_refused_by_their_name_or_right(kind, num_ranks):
    assert_right_or_refused(kind, num_ranks=num_ranks, match=NAMED)


class Saved(Stateful):
    """A saved buffer of the root."""

    def build(self):
        self.register_buffer("calls", torch.zeros(()))

    def advance(self, rows):
        self.calls += 1


class SavedAnew(Saved):
    def advance(self, rows):
        self.calls = self.calls + 1


class SavedBehind(Chain):
    def build(self):
        self.register_buffer("calls", torch.zeros(WIDTH))

    def call(self, block, number, hidden):
        hidden = block(hidden)
        if number == 2:
            self.calls.mul_(0.9).add_(hidden.detach().mean((0, 1)), alpha=0.1)
        return hidden - self.calls


@on_both
@pytest.mark.parametrize("kind", [Saved, SavedAnew, SavedBehind])
def test_saved_buffers_around_the_blocks_advance_once_or_are_refused_by_name(kind, num_ranks):
    assert_right_or_refused(kind, num_ranks=num_ranks, match=NAMED)


# ---- what is right


class Made(Chain):
    """A table of positions that each forward makes anew."""

    def build(self):
        self.register_buffer("table", torch.zeros(1, 1), persistent=False)

    def forward(self, rows):
        self.prepare(rows.shape[1])
        hidden = self.begin(rows)
        for block in self.blocks:
            hidden = block(hidden) * self.table
        return self.head(hidden)

    def prepare(self, length):
        self.table = torch.arange(1, length + 1, dtype=torch.float64)[:, None] / length


class MadeWhereLonger(Made):
    """As rotary embeddings grow their table."""

    def prepare(self, length):
        if self.table.shape[0] != length:
            super().prepare(length)


class LongRope(Made):
    """Frequencies that change where the sequence is long, and change back, as longrope does."""

    def build(self):
        super().build()
        self.register_buffer("short", torch.ones(1), persistent=False)

    def prepare(self, length):
        factor = self.short if length < 4 else self.short * 2
        self.register_buffer("table", torch.arange(1, length + 1)[:, None].double() / length * factor, persistent=False)


class AsAttribute(Made):
    def build(self):
        self.table = None


class LastLength(Made):
    """A number that follows from the batch alone."""

    def prepare(self, length):
        super().prepare(length)
        self.length = length


@on_both
@pytest.mark.parametrize("kind", [Made, MadeWhereLonger, LongRope, AsAttribute, LastLength])
def test_an_attribute_that_is_made_of_shapes_alone_is_right(kind, num_ranks):
    lengths = [3, 3, 5, 3, 4, 5]
    assert_right(kind, *[batch(seed, length) for seed, length in enumerate(lengths)], num_ranks=num_ranks)


class OfTheBatch(Made):
    """A value of the batch is made anew by each forward; it is nothing that stages could differ in."""

    def forward(self, rows):
        self.seen = rows.abs().mean()
        return super().forward(rows) * self.seen


class Memo(Made):
    """A dict of tables by length."""

    def build(self):
        self.tables = {}

    def prepare(self, length):
        if length not in self.tables:
            self.tables[length] = torch.arange(1, length + 1)[:, None] / length
        self.table = self.tables[length]


@on_both
@pytest.mark.parametrize("kind", [OfTheBatch, Memo])
def test_an_attribute_that_follows_from_the_batch_is_right_or_refused_by_name(kind, num_ranks):
    lengths = [3, 3, 5, 3, 5]
    batches = [batch(seed, length) for seed, length in enumerate(lengths)]
    assert_right_or_refused(kind, *batches, num_ranks=num_ranks, match=r"seen|tables?")


class BlockState(Chain):
    """State of blocks themselves, which their own forwards advance."""

    class block(Block):  # noqa: N801
        def __init__(self):
            super().__init__()
            self.calls = 0
            self.register_buffer("saved", torch.zeros(()))
            self.register_buffer("unsaved", torch.zeros(()), persistent=False)
            self.history = []

        def forward(self, hidden):
            self.calls += 1
            self.saved += 1
            self.unsaved = self.unsaved + hidden.detach().mean()
            self.history.append(hidden.shape[1])
            return super().forward(hidden) * (1 + self.calls / 10 + self.saved / 20) + self.unsaved


class Normed(Chain):
    class block(Block):  # noqa: N801
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, hidden):
            return super().forward(self.norm(hidden.flatten(0, 1)).view_as(hidden))


@on_both
@pytest.mark.parametrize("kind", [BlockState, Normed])
def test_state_within_a_block_is_the_blocks_own(kind, num_ranks):
    assert_right(kind, batch(1), batch(1), batch(2), num_ranks=num_ranks)
