"""What the owner of a cut model replaces after the cut is refused where layers hold the earlier one."""

import pytest
import torch
from torch import nn

from tests.support.cut_cases import WIDTH, Block, Chain, assert_refused, assert_right, batch, call_of


class Scaled(Chain):
    def build(self):
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Buffer(torch.zeros(WIDTH))

    def call(self, block, number, hidden):
        return block(hidden) * self.scale + self.shift


def replace_block(model):
    model.blocks[1] = Block().double()


def swap_blocks(model):
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


def remove_block(model):
    del model.blocks[3]


def replace_begin(model):
    model.begin = nn.Linear(WIDTH, WIDTH).double()


def replace_parameter(model):
    model.scale = nn.Parameter(torch.full((WIDTH,), 2.0, dtype=torch.float64))


def replace_buffer(model):
    model.shift = torch.ones(WIDTH, dtype=torch.float64)


def load_assigned(model):
    model.load_state_dict({name: tensor / 2 for name, tensor in model.state_dict().items()}, assign=True)


def steps(change):
    return call_of(batch(1)), call_of(batch(1), change=change), call_of(batch(2))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (replace_block, r"blocks\.1"), (swap_blocks, r"blocks\.0"), (remove_block, r"blocks\.3"),
        (replace_begin, "begin"), (replace_parameter, "scale"), (replace_buffer, "shift"), (load_assigned, "scale"),
    ],
)  # fmt: skip
def test_a_submodule_or_tensor_that_is_replaced_is_refused_by_its_name(change, name):
    assert_refused(Scaled, *steps(change), num_ranks=2, match=rf"'{name}' of Scaled was re", call=1)


def change_in_place(model):
    model.load_state_dict({name: tensor / 2 for name, tensor in model.state_dict().items()})


def move(model):
    """As of a move to a device: torch makes new buffers."""
    model._buffers["shift"] = model.shift.clone()


@pytest.mark.parametrize("change", [change_in_place, move])
def test_a_change_in_place_holds_from_the_next_step_on(change):
    assert_right(Scaled, *steps(change), num_ranks=2)
