"""A forward that goes another way in a later batch: by a flag, a value, a length, or keywords that come and go."""

import pytest
import torch
from torch import nn

from tests.support.cut_cases import LENGTH, ROWS, WIDTH, Block, Chain, assert_right, assert_right_or_refused, batch
from tests.support.cut_cases import call_of as call

on_both = pytest.mark.parametrize("num_ranks", [1, 2])
FULL, SOME = torch.full((ROWS,), LENGTH), torch.tensor([3, 2, 3, 1, 3, 3, 1, 3])
ONE_MICROBATCH = torch.tensor([3, 3, 3, 3, 3, 2, 1, 3])
"""Lengths of which the second microbatch of two has padding."""


class Padded(Chain):
    """A mask of hidden values, where lengths say that some rows are shorter."""

    def forward(self, rows, lengths):
        hidden, keep = self.begin(rows), None
        if (lengths < rows.shape[1]).any():
            keep = (hidden.abs().sum(-1, keepdim=True) > 1.0).double()
        for block in self.blocks:
            hidden = block(hidden) if keep is None else block(hidden) * keep
        return self.head(hidden)


class PaddedArgument(Padded):
    """The same mask as an argument of the blocks."""

    def forward(self, rows, lengths):
        hidden, keep = self.begin(rows), 1.0
        if int(lengths.min()) < rows.shape[1]:
            keep = hidden.sigmoid().mean(-1, keepdim=True)
        for block in self.blocks:
            hidden = block(hidden, keep)
        return self.head(hidden)


class SkippedAt(Padded):
    """A long skip from one block to another one."""

    def forward(self, rows, lengths):
        hidden = first = self.begin(rows)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden)
            first = hidden if number == 0 else first
            if number == 2 and lengths.sum() < lengths.numel() * rows.shape[1]:
                hidden = hidden + first.tanh()
        return self.head(hidden)


class Cut(Padded):
    """The hidden state is cut to the longest row, which `.item()` says, and filled up behind the blocks."""

    def forward(self, rows, lengths):
        longest = lengths.max().item()
        hidden = start = self.begin(rows)
        for block in self.blocks:
            hidden = block(hidden[:, :longest])
        return self.head(nn.functional.pad(hidden, (0, 0, 0, rows.shape[1] - longest)) + start)


class WithHead(Padded):
    """A module of the end, called between the blocks where there is padding."""

    def forward(self, rows, lengths):
        hidden = self.begin(rows)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden)
            if number == 1 and (lengths < 2).any():
                hidden = hidden * self.head.weight[0]
        return self.head(hidden)


BY_LENGTHS = [Padded, PaddedArgument, SkippedAt, Cut, WithHead]


@on_both
@pytest.mark.parametrize("later", [SOME, ONE_MICROBATCH], ids=["all", "one microbatch"])
@pytest.mark.parametrize("kind", BY_LENGTHS)
def test_a_batch_with_padding_behind_one_without(kind, later, num_ranks):
    batches = [batch(1, lengths=FULL), batch(2, lengths=FULL), batch(3, lengths=later), batch(4, lengths=FULL)]
    assert_right_or_refused(kind, *batches, num_ranks=num_ranks, match=r"begin|blocks\.\d|head|lengths|weight")


@on_both
@pytest.mark.parametrize("kind", BY_LENGTHS)
def test_a_batch_with_padding_in_an_evaluation_behind_a_training_without(kind, num_ranks):
    calls = [batch(1, lengths=FULL), call(batch(2, lengths=SOME), False), batch(3, lengths=SOME)]
    assert_right_or_refused(kind, *calls, num_ranks=num_ranks, match=r"begin|blocks\.\d|head|lengths|weight")


class Flagged(Chain):
    """A Python flag of the batch."""

    def forward(self, rows, flag):
        hidden = start = self.begin(rows)
        for block in self.blocks:
            hidden = block(hidden)
            hidden = hidden + start if flag else hidden
        return self.head(hidden)


class Leveled(Chain):
    """A number of the batch: how many blocks take the mask."""

    def forward(self, rows, flag):
        hidden = self.begin(rows)
        mask = hidden.sigmoid()
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, mask) if number < flag else block(hidden)
        return self.head(hidden)


class Named(Chain):
    """A text of the batch says which value is added behind the blocks."""

    def forward(self, rows, flag):
        hidden, seen = self.begin(rows), []
        for block in self.blocks:
            hidden = block(hidden)
            seen.append(hidden)
        return self.head(hidden + seen[{False: 3, True: 0}[bool(flag)]])


@on_both
@pytest.mark.parametrize("kind", [Flagged, Leveled, Named])
def test_a_flag_that_is_set_in_a_later_batch(kind, num_ranks):
    batches = [batch(1, flag=False), batch(2, flag=False), batch(3, flag=True), batch(1, flag=False), batch(5, flag=1)]
    assert_right_or_refused(kind, *batches, num_ranks=num_ranks, match=r"begin|blocks\.\d|flag")


class Longer(Chain):
    def forward(self, rows):
        hidden = start = self.begin(rows)
        for block in self.blocks:
            hidden = block(hidden) + start if rows.shape[1] > LENGTH else block(hidden)
        return self.head(hidden)


class LongerBlock(Chain):
    """The length of the hidden state decides, which a skip makes."""

    def forward(self, rows):
        hidden = self.begin(rows)
        for number, block in enumerate(self.blocks):
            before, hidden = hidden, block(hidden)
            if number == 2 and len(hidden) * hidden.shape[1] > 4 * LENGTH:
                hidden = torch.cat([hidden[:, :LENGTH], before[:, LENGTH:]], 1)
        return self.head(hidden)


@on_both
@pytest.mark.parametrize("kind", [Longer, LongerBlock])
def test_a_longer_batch_takes_another_way(kind, num_ranks):
    batches = [batch(1), batch(2), batch(3, LENGTH + 1), batch(4), batch(5, LENGTH + 2)]
    assert_right_or_refused(kind, *batches, num_ranks=num_ranks, match=r"begin|blocks\.\d")


class Keyworded(Chain):
    """Keywords that some batches bring."""

    def forward(self, rows, mask=None, weight=None):
        hidden = self.begin(rows)
        mask = 1.0 if mask is None else mask.unsqueeze(-1).double()
        for block in self.blocks:
            hidden = block(hidden, mask)
            hidden = hidden if weight is None else hidden * weight
        return self.head(hidden)


@on_both
def test_keywords_that_change_between_steps(num_ranks):
    mask, weight = torch.rand(ROWS, LENGTH) < 0.7, torch.rand(ROWS, 1, 1).double()
    calls = [batch(1), batch(2, mask=mask), call(batch(3, weight=weight), False), batch(4, mask=mask, weight=weight)]
    assert_right(Keyworded, *calls, batch(5), batch(6, weight=weight), num_ranks=num_ranks)


class Alternating(Chain):
    """Blocks take a keyword in some batches, of which later ones need a value of the begin."""

    class block(Block):  # noqa: N801
        def forward(self, hidden, factor=1.0, *, memory=None):
            return super().forward(hidden if memory is None else hidden + memory, factor)

    def forward(self, rows, memory=None):
        hidden = self.begin(rows)
        keywords = {} if memory is None else {"memory": self.begin(memory)}
        for block in self.blocks:
            hidden = block(hidden, **keywords)
        return self.head(hidden)


@on_both
def test_keywords_of_blocks_that_change_between_steps(num_ranks):
    """A module of the begin that is called twice in some batches may be refused, by its name."""
    memory = torch.ones(ROWS, 1, WIDTH, dtype=torch.float64)
    batches = [batch(1), batch(2), batch(3, memory=memory), batch(4)]
    assert_right_or_refused(Alternating, *batches, num_ranks=num_ranks, match=r"begin|memory")


class SomeMicrobatches(Chain):
    """A skip in the microbatches whose first value is above zero."""

    def forward(self, rows):
        hidden = start = self.begin(rows)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden)
            if number == 3 and rows[0, 0, 0] > 0:
                hidden = hidden + start
        return self.head(hidden)


class SomeSecondOutputs(Chain):
    """Blocks return a second output in some microbatches only."""

    class block(Block):  # noqa: N801
        def forward(self, hidden, factor=1.0):
            output = super().forward(hidden, factor)
            return (output, output.mean()) if float(hidden[0, 0, 0]) > 0 else (output, None)

    def forward(self, rows):
        hidden, total = self.begin(rows), 0.0
        for block in self.blocks:
            hidden, second = block(hidden)
            total = total if second is None else total + second
        return self.head(hidden) * (1 + total)


@on_both
@pytest.mark.parametrize("kind", [SomeMicrobatches, SomeSecondOutputs])
def test_a_skip_that_a_stage_makes_in_some_microbatches(kind, num_ranks):
    batches = [batch(seed) for seed in range(1, 6)]
    assert_right_or_refused(
        kind, *batches, num_ranks=num_ranks, num_microbatches=4, match=r"begin|blocks\.\d|second|total"
    )


class Gated(Chain):
    """A branch on what a module computed, around the blocks."""

    def forward(self, rows):
        hidden = self.begin(rows)
        is_large = bool(hidden.abs().mean() > 0.5)
        for block in self.blocks:
            hidden = block(hidden, 2.0 if is_large else 1.0)
        return self.head(hidden)


class Itemised(Chain):
    def call(self, block, number, hidden):
        return block(hidden, 1 + hidden.detach().abs().max().item() / 10)


class Listed(Chain):
    def call(self, block, number, hidden):
        return block(hidden, sum(hidden.detach().flatten().tolist()) / 100)


class Indexed(Chain):
    """A shape that follows from computed values."""

    def call(self, block, number, hidden):
        rows = torch.nonzero(hidden.detach().mean((1, 2)) > 0).flatten()
        return block(hidden.index_fill(0, rows, 0.0))


@on_both
@pytest.mark.parametrize("kind", [Gated, Itemised, Listed, Indexed])
def test_a_branch_on_computed_values_names_the_module_that_computed_them(kind, num_ranks):
    assert_right_or_refused(kind, num_ranks=num_ranks, match=r"begin|blocks\.\d")
