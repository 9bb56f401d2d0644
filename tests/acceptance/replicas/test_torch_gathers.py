"""torch's own placement of gathers: proved and planned as it is, and what Penstock's placement needs instead."""

from itertools import product

import pytest

from bench.torch_gathers import costs_of, figures, placed_by_torch
from penstock.lowering import Sharding, lower
from penstock.planning import prove_and_lower
from penstock.schedules import build


@pytest.mark.parametrize(
    ("name", "stages_per_rank", "bytes_at_most"),
    [("interleaved-1f1b", 4, 0.92), ("looped-bfs", 4, 0.86), ("zbv", 2, 1)],
)
@pytest.mark.parametrize("ratio", [0.25, 1.0, 2.0])
def test_some_setting_is_as_fast_as_torchs_placement_with_fewer_bytes(name, stages_per_rank, bytes_at_most, ratio):
    """A rank of zbv has two stages, so torch has all of them whole, and nothing is left to gain."""
    schedule = build(name, ranks=2, microbatches=8, stages_per_rank=stages_per_rank)
    costs, theirs = costs_of(schedule.num_stages, ratio), placed_by_torch(schedule)
    assert prove_and_lower(theirs, sharding=Sharding("full", residency=1)) is theirs
    step_s, num_bytes = figures(theirs, costs)

    settings = product((1, 2, 3), range(4))
    found = [
        figures(lower(schedule, shard="full", residency=residency, look_ahead=look_ahead), costs)
        for residency, look_ahead in settings
    ]

    fewest = min(own_bytes for own_s, own_bytes in found if own_s <= step_s * (1 + 1e-9))
    assert fewest <= bytes_at_most * num_bytes
