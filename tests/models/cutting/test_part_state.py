"""An object that parts fill, each its own: it is taken where any other filled argument is refused."""

import copy

import pytest
import torch
from torch import nn

from penstock.errors import PenstockError
from penstock.models.cutting.cut import cut
from penstock.models.cutting.part_state import PartState, has_part_state


class Sums(PartState):
    """Keeps the sum of all that a block has read, by the index of the block."""

    def __init__(self, seen=0):
        self.seen, self.sums = seen, {}

    @property
    def common(self):
        return self.seen

    def without_values(self):
        return Sums(self.seen)


class Plain:
    def __init__(self):
        self.seen, self.sums = 0, {}


class Block(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index, self.linear = index, nn.Linear(4, 4)

    def forward(self, hidden, state):
        total = state.sums[self.index] = state.sums.get(self.index, 0) + hidden
        return self.linear(hidden) + total.tanh()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, range(3)))

    def forward(self, x, state):
        hidden = x * (state.seen + 1)
        for block in self.blocks:
            hidden = block(hidden, state)
        return hidden


def read_by_parts(parts, states, batches):
    """Read batches by parts that have a state each; the last one returns the output."""
    outputs = []
    for x in batches:
        value = x
        with torch.no_grad():
            for index, (part, state) in enumerate(zip(parts, states, strict=True)):
                value = part(**{"x": x, "state": state}) if index == 0 else part(value, x=x, state=state)
        outputs.append(value)
        for state in states:
            state.seen += 1
    return outputs


def test_each_part_fills_a_state_of_its_own_and_all_read_what_is_common():
    model, batches = Model(), [torch.randn(2, 4) for _ in range(3)]
    whole_state, expected = Sums(), []
    with torch.no_grad():
        for x in batches:
            expected.append(model(x, whole_state))
            whole_state.seen += 1
    states = [Sums() for _ in range(3)]

    outputs = read_by_parts(cut(copy.deepcopy(model), ["blocks.*"]), states, batches)

    assert all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True))
    assert [list(state.sums) for state in states] == [[0], [1], [2]]


def test_any_other_object_that_a_block_fills_is_still_refused():
    parts = cut(Model(), ["blocks.*"])

    with pytest.raises(PenstockError, match=r"'blocks.0' changes its argument 'state' \(Plain\)"):
        read_by_parts(parts, [Plain() for _ in parts], [torch.randn(2, 4)])


def test_states_are_found_in_trees():
    assert has_part_state((1, {"state": [Sums()]}))
    assert not has_part_state((1, {"state": [Plain()]}))
