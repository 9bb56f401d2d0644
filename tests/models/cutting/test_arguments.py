"""What a call changes of its further arguments is named as the submodule names it."""

import pytest
import torch
from torch import nn

from penstock.errors import PenstockError
from penstock.models.cutting.arguments import UnchangedArguments


class Block(nn.Module):
    def forward(self, hidden, mask, *, seen=None):
        return hidden


HIDDEN, MASK = torch.ones(2), torch.ones(2)


@pytest.mark.parametrize(
    ("change", "name"), [(lambda seen: MASK.add_(1), "'mask'"), (lambda seen: seen.append(1), "'seen'")]
)
def test_a_changed_argument_is_refused_by_its_name(change, name):
    seen = []
    arguments = UnchangedArguments("blocks.0", (HIDDEN, MASK), {"seen": seen})
    arguments.require(Block())
    change(seen)
    with pytest.raises(PenstockError, match=f"'blocks.0' changes its argument {name}"):
        arguments.require(Block())


def test_the_first_argument_may_be_changed_also_by_keyword():
    for args, kwargs in (((HIDDEN,), {}), ((), {"hidden": HIDDEN, "mask": MASK})):
        arguments = UnchangedArguments("blocks.0", args, kwargs)
        HIDDEN.add_(1)
        arguments.require(Block())
