"""torch's own placement of gathers: proved and planned as it is, and what Penstock's placement needs instead."""

from itertools import product

import numpy as np
import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from penstock.ir.operations import Op
from penstock.ir.program import NewRows
from penstock.lowering import Sharding, lower
from penstock.planning import prove_and_lower
from penstock.schedules import build
from penstock.simulation import Costs, simulate

WEIGHTS = (1.0, 1.6, 0.7, 1.2, 0.9, 1.4, 0.8, 1.1)
"""How much larger each stage is than the mean one."""
MOST_ACTIVE = 3
"""Stages that torch keeps whole."""


def placed_by_torch(schedule):
    """The program with UNSHARD and RESHARD where torch puts them, and its one reduction per stage."""
    program = lower(schedule)
    new = []
    for rank in range(program.num_ranks):
        rows = program.compute_rows(rank).tolist()
        actions = [torch_schedules._Action.from_str(str(program.instruction(row))) for row in rows]
        place = 0
        for action in torch_schedules._add_unshard_reshard(actions, MOST_ACTIVE):
            if action.computation_type.name in ("UNSHARD", "RESHARD"):
                key = NewRows.before(rows[place]) if place < len(rows) else NewRows.after(rows[-1])
                new.append((key, rank, Op[action.computation_type.name], action.stage_index))
            else:
                place += 1
    key, rank, op, stage = map(np.array, zip(*new, strict=True))
    zeros = np.zeros(len(key), np.int64)
    return program.inserted(NewRows(key, rank, op, stage, zeros, zeros, stage))


def costs_of(num_stages, ratio):
    """Uneven stages, whose gathers and reductions take so many forwards."""
    sizes = np.array(WEIGHTS[:num_stages])
    each, seconds = (tuple((factor * sizes).tolist()) for factor in (1.0, ratio))
    static, activation = (tuple((num_bytes * sizes).astype(int).tolist()) for num_bytes in (16e6, 2e6))
    return Costs(
        forward_s=each,
        backward_input_s=each,
        backward_weight_s=each,
        unshard_s=seconds,
        reduce_s=seconds,
        activation_bytes=activation,
        parameter_bytes=static,
        gradient_bytes=static,
        optimizer_bytes=static,
        shards=8,
    )


def figures(program, costs):
    """Seconds of the step, and the most bytes of a rank."""
    timeline = simulate(program, costs)
    return timeline.step_s, max(np.add(timeline.peak_bytes, timeline.static_bytes))


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
