"""Draws around the blocks of a cut model: one draw for all blocks is one draw, on every stage."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.cut_cases import (
    WIDTH,
    Block,
    Chain,
    assert_refused,
    assert_right,
    assert_right_or_refused,
    batch,
    call_of,
)
from tests.support.draws import drawn

on_both = pytest.mark.parametrize("num_ranks", [1, 2])


class Masked(Chain):
    """Rows that skip all blocks."""

    def forward(self, rows):
        keep = drawn("keep", rows, lambda: self.draw(rows)) if self.training else 0.5
        hidden = self.begin(rows)
        for block in self.blocks:
            hidden = block(hidden, keep)
        return self.head(hidden)

    def draw(self, rows):
        return (torch.rand(len(rows), 1, 1) < 0.5).double()


class Bernoulli(Masked):
    def draw(self, rows):
        return torch.bernoulli(torch.full((len(rows), 1, 1), 0.5, dtype=torch.float64))


class Variational(Masked):
    """Variational dropout: one mask of the features for all blocks."""

    def draw(self, rows):
        return F.dropout(torch.ones_like(rows[:, :1]), 0.5)


class ByModule(Masked):
    def build(self):
        self.drop = nn.Dropout(0.5)

    def draw(self, rows):
        return self.drop(torch.ones_like(rows))


class Shuffled(Masked):
    """Integers: an order, of which a mask is made."""

    def draw(self, rows):
        return torch.randperm(rows.shape[1]).double()[:, None] / rows.shape[1]


class InPlace(Masked):
    def draw(self, rows):
        return torch.empty_like(rows).uniform_(0, 2)


class Noised(Masked):
    def draw(self, rows):
        return 1 + torch.randn_like(rows) / 4 + torch.randint(3, (len(rows), 1, 1))


@on_both
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("kind", [Masked, Bernoulli, Variational, ByModule, Shuffled, InPlace, Noised])
def test_all_blocks_get_the_mask_that_was_drawn_for_them(kind, seed, num_ranks):
    calls = [batch(1), batch(2), call_of(batch(3), False), batch(4)]
    assert_right(kind, *calls, num_ranks=num_ranks, options={} if seed is None else {"seed": seed})


class AtTheEnd(Chain):
    """The mask is used on the first stage and behind the last block."""

    def forward(self, rows):
        noise = drawn("noise", rows, lambda: torch.randn(rows.shape[-1]).double())
        hidden = self.begin(rows) + noise
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) - noise


class OfHidden(Chain):
    """The mask is dropped out of a value of the begin, and travels with its gradient."""

    def forward(self, rows):
        hidden = self.begin(rows)
        gate = hidden.sigmoid()
        gate = gate * drawn("gate", gate, lambda: F.dropout(torch.ones_like(gate), 0.5))
        for block in self.blocks:
            hidden = block(hidden) * (1 + gate)
        return self.head(hidden)


class Between(Chain):
    """A dropout behind each block, of a mask for each."""

    def call(self, block, number, hidden):
        hidden = block(hidden)
        return hidden * drawn(f"block {number}", hidden, lambda: F.dropout(torch.ones_like(hidden), 0.3))


@on_both
@pytest.mark.parametrize("kind", [AtTheEnd, OfHidden, Between])
def test_a_draw_is_made_once_wherever_it_is_used(kind, num_ranks):
    assert_right(kind, batch(1), batch(2), batch(3), num_ranks=num_ranks, options={"seed": 1})


class Generated(Masked):
    """A generator of the model's own is state."""

    def build(self):
        self.source = torch.Generator().manual_seed(5)

    def draw(self, rows):
        return (torch.rand(len(rows), 1, 1, generator=self.source) < 0.5).double()


@on_both
def test_a_generator_of_the_model_draws_once_or_is_refused(num_ranks):
    assert_right_or_refused(Generated, num_ranks=num_ranks, match=r"source|[Gg]enerator")


class LuckyNumber(Chain):
    """A number of Python's generator, for all blocks."""

    def forward(self, rows):
        luck = drawn("luck", rows, self.draw)
        hidden = self.begin(rows)
        for block in self.blocks:
            hidden = block(hidden, luck)
        return self.head(hidden)

    def draw(self):
        return random.random()


class LuckyBranch(LuckyNumber):
    def draw(self):
        return 2.0 if random.randrange(2) else 1.0


class LuckyChoice(LuckyNumber):
    def draw(self):
        return random.choice([0.5, 1.0, 1.5])


class LuckyArray(LuckyNumber):
    """NumPy's generator."""

    def draw(self):
        return float(np.random.rand())


@on_both
@pytest.mark.parametrize("kind", [LuckyNumber, LuckyBranch, LuckyChoice, LuckyArray])
def test_a_draw_that_is_not_torchs_is_refused_or_made_once(kind, num_ranks):
    assert_right_or_refused(kind, num_ranks=num_ranks, match=r"[Rr]andom|numpy|NumPy|draw")


class LayerDrop(Chain):
    """As transformers leaves layers out: by a number of torch's generator, on which the forward branches."""

    def call(self, block, number, hidden):
        if self.training and torch.rand([]) < 0.3:
            return hidden
        return block(hidden)


class PythonLayerDrop(LayerDrop):
    def call(self, block, number, hidden):
        return hidden if self.training and random.random() < 0.3 else block(hidden)


@on_both
@pytest.mark.parametrize("kind", [LayerDrop, PythonLayerDrop])
def test_layer_drop_is_refused_as_such(kind, num_ranks):
    batches = [batch(seed) for seed in range(1, 7)]
    assert_refused(kind, *batches, num_ranks=num_ranks, match=r"(?i)layer.?drop|left out|leaves out|random", call=5)


class Shifted(Chain):
    """Noise that blocks get and that the end takes away again: one draw leaves no trace, several do."""

    class block(Block):  # noqa: N801
        def forward(self, hidden):
            return hidden + self.inner.bias

    def forward(self, rows):
        hidden = self.begin(rows)
        noise = self.noise(hidden.detach())
        for block in self.blocks:
            hidden = block(hidden) + noise
        return hidden - len(self.blocks) * noise + self.head(hidden * 0)


class Dirichlet(Shifted):
    def noise(self, hidden):
        return torch.distributions.Dirichlet(torch.ones(WIDTH, dtype=hidden.dtype)).sample() + torch.rand(())


class OfAnOverload(Shifted):
    def noise(self, hidden):
        return torch.ops.aten.rand_like.default(hidden) + torch.ops.aten.bernoulli.p(hidden, 0.5)


class IntoAView(Shifted):
    def noise(self, hidden):
        noise = torch.zeros_like(hidden) + hidden
        noise[1].uniform_()
        noise[:, 0].normal_()
        return noise


class IntoATensor(Shifted):
    def noise(self, hidden):
        noise = torch.empty(WIDTH, dtype=hidden.dtype)
        torch.rand(WIDTH, out=noise)
        return noise


@pytest.mark.parametrize("kind", [Dirichlet, OfAnOverload, IntoAView, IntoATensor])
def test_a_draw_is_one_draw_by_any_function_of_torch(kind):
    assert_right(kind, num_ranks=2)


class OfPairs(Shifted):
    def noise(self, hidden):
        return torch.native_dropout(hidden, 0.5, True)[0]


class OfAScript(Shifted):
    """Kernels that no function of torch shows, beside one that it shows."""

    def noise(self, hidden):
        return scripted_noise(WIDTH) + torch.rand(())


@torch.jit.script
def scripted_noise(width: int):
    return torch.rand([width])


@pytest.mark.parametrize(("kind", "match"), [(OfPairs, "native_dropout"), (OfAScript, "by rand,")])
def test_draws_that_are_not_followed_are_refused_by_their_operator(kind, match):
    assert_refused(kind, num_ranks=2, match=match)


class WithinBlocks(Chain):
    """Blocks draw, while another rank, a thread of this process, runs the forward without values."""

    class block(Block):  # noqa: N801
        def forward(self, hidden):
            for _ in range(20):
                hidden = hidden + 0 * torch.rand_like(hidden)
            return super().forward(hidden)


@pytest.mark.slow
def test_what_other_threads_draw_meanwhile_is_not_the_forwards():
    assert_right(WithinBlocks, *[batch(seed) for seed in range(20)], num_ranks=4, num_microbatches=4)
