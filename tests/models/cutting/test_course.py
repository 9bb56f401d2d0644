"""A run of a part refuses what differs from the run without values, by names."""

import pytest
import torch
from torch import nn

from penstock.errors import PenstockError
from penstock.models.cutting.course import require_kinds
from penstock.models.cutting.cut import cut
from penstock.models.cutting.routes import Routes
from tests.models.cutting.test_part import run

ROWS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def test_an_output_of_other_shapes_or_types_than_found_is_refused():
    routes = Routes([], frozenset(), {"a#0": ((3,),)}, {}, {"a#0.0": torch.float32}, {})
    require_kinds("a#0", [torch.ones(3), 1], routes)
    with pytest.raises(PenstockError, match=r"'a' returns tensors of the shapes \[\(2,\)\]; expected \[\(3,\)\]"):
        require_kinds("a#0", (torch.ones(2), None), routes)
    with pytest.raises(PenstockError, match=r"'a' returns torch.bfloat16 where .* found torch.float32"):
        require_kinds("a#0", torch.ones(3, dtype=torch.bfloat16), routes)


class Model(nn.Module):
    """Goes another way where values are there: what the batch holds is changed behind its back."""

    def __init__(self):
        super().__init__()
        self.inp, self.blocks = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, rows, ways):
        hidden = first = self.inp(rows)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden * (first if next(ways) else 2)


def test_a_forward_that_goes_another_way_than_without_values_is_refused():
    with pytest.raises(PenstockError, match=r"depends on 'inp', which a layer of another stage computes"):
        run(cut(Model(), ["blocks.*"]), rows=ROWS, ways=iter([False, True]))
