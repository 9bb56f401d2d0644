"""What Python and torch let a forward do around its blocks: errors that it catches, types, hooks, data of tensors."""

import pytest

from tests.support.cut_cases import Chain, assert_refused


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
