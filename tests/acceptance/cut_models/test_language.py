"""What Python and torch let a forward do around its blocks: errors that it catches, types, hooks, data of tensors."""

import pytest
import torch

from tests.support.cut_cases import Block, Chain, assert_refused, assert_right


class Caught(Chain):
    """The forward has a way out for values that it cannot read."""

    def call(self, block, number, hidden):
        try:
            scale = float(hidden.abs().max())
        except Exception:
            scale = 1.0
        return block(hidden) / scale


class CaughtOfABlock(Chain):
    """The forward has a way out where a block has no such weight."""

    def call(self, block, number, hidden):
        try:
            return block.inner(hidden) + block(hidden)
        except Exception:
            return block(hidden)


@pytest.mark.parametrize(("kind", "match"), [(Caught, "__float__"), (CaughtOfABlock, r"blocks\.0\.inner")])
def test_a_refusal_that_the_forward_catches_is_raised_at_its_end(kind, match):
    assert_refused(kind, num_ranks=2, match=match)


class ByName(Chain):
    def call(self, block, number, hidden):
        return block(hidden) / 2 if type(block).__name__ == "Block" else block(hidden)


class ByEquality(Chain):
    def call(self, block, number, hidden):
        return block(hidden) / 2 if type(block) == Block else block(hidden)  # noqa: E721


class ByDict(Chain):
    def call(self, block, number, hidden):
        return block(hidden) / {Block: 2}.get(type(block), 1)


@pytest.mark.parametrize("kind", [ByName, ByEquality, ByDict])
def test_a_forward_may_ask_for_the_type_of_a_block(kind):
    assert_right(kind, num_ranks=2)


class Hooked(Chain):
    def call(self, block, number, hidden):
        hidden = block(hidden)
        hidden.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return hidden


class DataSet(Chain):
    def call(self, block, number, hidden):
        scale = torch.ones(1, dtype=hidden.dtype)
        scale.data = hidden.detach().mean()[None]
        return block(hidden) * scale


@pytest.mark.parametrize(("kind", "match"), [(Hooked, "register_hook"), (DataSet, r"\.data")])
def test_hooks_and_data_of_values_that_other_stages_have_are_refused(kind, match):
    assert_refused(kind, num_ranks=2, match=match)
