"""Attributes around the blocks of a cut model: set, deleted and read, modes, hooks, and changes by the owner."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.cut_cases import (
    LENGTH,
    WIDTH,
    Block,
    Chain,
    assert_right,
    assert_right_on_processes,
    assert_right_or_refused,
    batch,
    call_of,
)

on_both = pytest.mark.parametrize("num_ranks", [1, 2])


class Plain(Chain):
    """No forward does less: a test that fails with it says nothing about attributes."""


@on_both
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zbv"])
def test_a_plain_chain_is_right(num_ranks, schedule):
    assert_right(Plain, num_ranks=num_ranks, schedule=schedule if num_ranks > 1 else "1f1b")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Plain, "Scaled", "ByForward", "Moded"])
def test_processes_compute_what_threads_do(two_ranks, kind):
    assert_right_on_processes(two_ranks, globals()[kind] if isinstance(kind, str) else kind)


# ---- attributes that the forward sets


class Scaled(Chain):
    """From shapes and the number of the block alone."""

    def call(self, block, number, hidden):
        block.scale = 0.5 * (number + hidden.shape[-1])
        return block(hidden)


class Sized(Chain):
    """As Swin hands height and width to its blocks."""

    class block(Block):  # noqa: N801 - the attribute of Chain
        def forward(self, hidden):
            return super().forward(hidden.flip(1)) * self.H / (self.H + self.W)

    def call(self, block, number, hidden):
        block.H, block.W = hidden.shape[1], hidden.shape[2]
        return block(hidden)


class OfTheBatch(Chain):
    def forward(self, rows):
        for block in self.blocks:
            block.scale = rows.mean(-1, keepdim=True)
        return super().forward(rows)


class OfTheBegin(Chain):
    """A tensor of an earlier module, with its gradient."""

    def forward(self, rows):
        hidden = self.begin(rows)
        gate = hidden.sigmoid()
        for block in self.blocks:
            block.scale = gate
            hidden = block(hidden)
        return self.head(hidden)


class OfTheBlockBefore(Chain):
    def call(self, block, number, hidden):
        block.scale = hidden.mean()
        return block(hidden)


class OnTheBegin(Chain):
    """On modules before the first point and behind the last one."""

    class Gained(nn.Linear):
        def forward(self, rows):
            return super().forward(rows) * self.gain

    def build(self):
        self.begin, self.head = self.Gained(WIDTH, WIDTH), self.Gained(WIDTH, WIDTH)

    def forward(self, rows):
        self.begin.gain, self.head.gain = rows.shape[1] / 2, 1 / rows.shape[1]
        return super().forward(rows)


class OnSubmodules(Chain):
    class block(Block):  # noqa: N801
        def forward(self, hidden):
            return hidden + self.inner(hidden) * self.inner.gain

    def call(self, block, number, hidden):
        block.inner.gain = 1 / (number + 1)
        return block(hidden)


class Deleted(Chain):
    def call(self, block, number, hidden):
        block.scale = number / 2
        hidden = block(hidden)
        del block.scale
        assert not hasattr(block, "scale")
        return hidden


class Setattr(Chain):
    """Set by its name on all blocks before the first call, and read behind it."""

    def forward(self, rows):
        for number, block in enumerate(self.blocks):
            setattr(block, "scale", 1.0 + number)  # noqa: B010 - as a loop over names does it
        return super().forward(rows) * sum(block.scale for block in self.blocks)


SET = [Scaled, Sized, OfTheBatch, OnTheBegin, OnSubmodules, Deleted, Setattr]


@on_both
@pytest.mark.parametrize("kind", SET)
def test_an_attribute_that_the_forward_sets_is_on_the_block_when_it_runs(kind, num_ranks):
    assert_right(kind, batch(1), batch(2), batch(3, 5), call_of(batch(4), False), batch(1), num_ranks=num_ranks)


@on_both
@pytest.mark.parametrize("kind", [OfTheBegin, OfTheBlockBefore])
def test_an_attribute_that_a_module_made_comes_with_its_gradient(kind, num_ranks):
    assert_right_or_refused(kind, num_ranks=num_ranks, match=r"scale")


# ---- modes that the forward reads


class Dropping(Chain):
    def call(self, block, number, hidden):
        return hidden + F.dropout(block(hidden), 1.0, training=block.training)


class Moded(Chain):
    def call(self, block, number, hidden):
        return block(hidden) * (0.5 if block.training else 2.0)


class HeadModed(Chain):
    def forward(self, rows):
        hidden = self.begin(rows) * (3.0 if self.head.training else 1.0)
        for block in self.blocks:
            hidden = block(hidden, 2.0 if block.inner.training else 1.0)
        return self.head(hidden)


class AllModed(Chain):
    def call(self, block, number, hidden):
        share = sum(module.training for module in self.modules()) / 10
        return block(hidden) * share


@on_both
@pytest.mark.parametrize("kind", [Dropping, Moded, HeadModed, AllModed])
def test_the_mode_of_a_module_is_the_mode_of_the_call(kind, num_ranks):
    calls = [batch(1), call_of(batch(1), False), batch(2), batch(2), call_of(batch(3), False)]
    assert_right(kind, *calls, num_ranks=num_ranks)


def freeze_mode(model):
    model.blocks[1].eval()
    model.head.eval()


@on_both
@pytest.mark.parametrize("kind", [Moded, HeadModed])
def test_a_module_that_its_owner_sets_to_evaluation_stays_there(kind, num_ranks):
    assert_right(kind, *[call_of(batch(seed), change=freeze_mode) for seed in (1, 1, 2)], num_ranks=num_ranks)


# ---- properties of modules and of values that the forward reads


class Reading(Chain):
    """Numbers, shapes and types of modules of other stages."""

    def build(self):
        for number, block in enumerate(self.blocks):
            block.depth = number

    def call(self, block, number, hidden):
        assert isinstance(block, Block)
        assert block is self.blocks[number]
        size = block.inner.in_features + len(self.blocks) + self.head.weight.shape[0]
        return block(hidden, (block.depth + size) / 10) * sum(p.numel() for p in block.parameters()) / 20


class ReadingParameters(Chain):
    def call(self, block, number, hidden):
        return block(hidden) * block.inner.weight.mean() + self.head.bias


class Differentiable(Chain):
    """Goes by whether a block's input takes a gradient; told to all blocks, and asked between them."""

    def forward(self, rows):
        hidden = self.begin(rows)
        is_trained = hidden.requires_grad
        for block in self.blocks:
            hidden = block(hidden, 2.0 if is_trained else 0.5) * (0.7 if hidden.requires_grad else 1.0)
        return self.head(hidden) * (2 if is_trained else 1)


class Leaf(Chain):
    def forward(self, rows):
        hidden = self.begin(rows)
        has_graph, is_leaf = hidden.grad_fn is not None, hidden.is_leaf
        for block in self.blocks:
            hidden = block(hidden, 1.0 + has_graph + 2 * is_leaf)
            hidden = hidden * (0.5 if hidden.grad_fn is None else 0.8)
        return self.head(hidden) * (2 if has_graph else 1)


class Strided(Chain):
    """Blocks return values that are not contiguous."""

    class block(Block):  # noqa: N801
        def forward(self, hidden, factor=1.0):
            return super().forward(hidden, factor).transpose(0, 1).contiguous().transpose(0, 1)

    def forward(self, rows):
        hidden = self.begin(rows)
        first = hidden.is_contiguous()
        for block in self.blocks:
            hidden = block(hidden, 0.5 if hidden.is_contiguous() else 1.5)
            hidden = hidden * hidden.stride(0) / 4 if first else hidden
        return self.head(hidden)


class Detached(Chain):
    """The gradient of the chain ends at a block."""

    def call(self, block, number, hidden):
        hidden = hidden.detach() if number == 2 else hidden
        return block(hidden, 2.0 if hidden.requires_grad else 1.0)


@on_both
@pytest.mark.parametrize("kind", [Reading, Differentiable, Leaf, Strided, Detached])
def test_stand_ins_tell_the_truth(kind, num_ranks):
    calls = [batch(1), call_of(batch(1), False), batch(1), batch(2)]
    assert_right(kind, *calls, num_ranks=num_ranks)


@on_both
def test_parameters_of_other_stages_are_read_or_refused(num_ranks):
    assert_right_or_refused(ReadingParameters, num_ranks=num_ranks, match=r"weight|bias|head")


# ---- hooks


class AddOne:
    """A forward hook; copies of a model take it along."""

    def __call__(self, module, args, output):
        return output + 1


class Doubling:
    def __call__(self, module, args):
        return (args[0] * 2, *args[1:])


class Hooked(Chain):
    def build(self):
        for block in self.blocks:
            block.register_forward_hook(AddOne())
            block.register_forward_pre_hook(Doubling())


class ByForward(Hooked):
    def call(self, block, number, hidden):
        return block.forward(hidden)


class OneByForward(Hooked):
    def call(self, block, number, hidden):
        return block.forward(hidden) if number == 2 else block(hidden)


class ByForwardWithArguments(Hooked):
    def call(self, block, number, hidden):
        return block.forward(hidden=hidden, factor=number / 2)


class Bound(Hooked):
    """The method is taken before the loop."""

    def forward(self, rows):
        hidden = self.begin.forward(rows)
        for forward in [block.forward for block in self.blocks]:
            hidden = forward(hidden)
        return self.head.forward(hidden)


@on_both
@pytest.mark.parametrize("kind", [Hooked, ByForward, OneByForward, ByForwardWithArguments, Bound])
def test_hooks_run_where_a_module_is_called_and_not_where_its_forward_is(kind, num_ranks):
    assert_right(kind, num_ranks=num_ranks)


# ---- changes by the owner of the model, between calls


class Config:
    def __init__(self):
        self.factor = 1.0


class Owned(Chain):
    def build(self):
        self.strength, self.config, self.gate = 1.0, Config(), nn.Dropout(0.0)
        self.register_buffer("ramp", torch.ones(WIDTH), persistent=False)

    def call(self, block, number, hidden):
        return block(hidden, self.strength) + self.gate(hidden) * self.ramp * self.config.factor


def set_number(model):
    model.strength = 3.0


def set_probability(model):
    model.gate.p = 1.0


def set_buffer(model):
    model.ramp = torch.full((WIDTH,), 0.25, dtype=torch.float64)


def fill_buffer(model):
    model.ramp.fill_(0.5)


def set_config(model):
    model.config.factor = -1.0


def add_hook(model):
    model.gate.register_forward_hook(AddOne())


def set_number_of_a_block(model):
    model.blocks[2].scale = 0.3


def set_all(model):
    for change in (set_number, fill_buffer, set_config, set_number_of_a_block):
        change(model)


CHANGES = [
    set_number,
    set_buffer,
    fill_buffer,
    set_config,
    add_hook,
    set_number_of_a_block,
    set_all,
]


@on_both
@pytest.mark.parametrize("change", CHANGES)
def test_what_the_owner_changes_after_the_cut_holds_from_the_next_step_on(change, num_ranks):
    calls = [call_of(batch(1)), call_of(batch(1)), call_of(batch(1), change=change), call_of(batch(2, LENGTH))]
    assert_right(Owned, *calls, num_ranks=num_ranks)


@on_both
def test_a_draw_that_the_owner_turns_on_holds_or_needs_messages_of_other_layouts(num_ranks):
    """With it, other leaves travel than the ranks have agreed on for batches of this layout."""
    calls = [call_of(batch(1)), call_of(batch(1)), call_of(batch(1), change=set_probability)]
    assert_right_or_refused(Owned, *calls, num_ranks=num_ranks, match="variable_shapes=True")
