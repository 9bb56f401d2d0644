"""Simulates settings of gathers against torch's placement of them, over uneven stages: for bench/replicas.py."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
from torch.distributed.pipelining import schedules as torch_schedules

from penstock.ir.operations import Op
from penstock.ir.program import NewRows, Program
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import Costs, simulate

CASES = [("interleaved-1f1b", 4), ("looped-bfs", 4), ("zbv", 2)]
RANKS, MICROBATCHES, REPLICAS = 2, 8, 8
GATHERS = (0.25, 1.0, 2.0)
"""What a gather takes, and a reduction, in forwards of its stage."""
WEIGHTS = (1.0, 1.6, 0.7, 1.2, 0.9, 1.4, 0.8, 1.1)
"""How much larger each stage is than the mean one."""
MOST_ACTIVE = 3
"""Stages that torch keeps whole."""
SETTINGS = [*product((1, 2, 3, None), range(4))]
"""Residency and look-ahead."""
NOISE = 1e-9


def simulated() -> Iterator[dict[str, Any]]:
    """Compare the best setting with torch's placement, at no more memory and at no more time."""
    for (family, stages_per_rank), gather in product(CASES, GATHERS):
        schedule = build(family, ranks=RANKS, microbatches=MICROBATCHES, stages_per_rank=stages_per_rank)
        costs = costs_of(schedule.num_stages, gather)
        torch_s, torch_bytes = figures(placed_by_torch(schedule), costs)
        found = [
            figures(lower(schedule, shard="full", residency=most, look_ahead=ahead), costs) for most, ahead in SETTINGS
        ]
        yield {
            "family": family,
            "gather": gather,
            "seconds_at_no_more_bytes": min((s for s, size in found if size <= torch_bytes), default=np.inf) / torch_s,
            "bytes_at_no_more_seconds": min((size for s, size in found if s <= torch_s * (1 + NOISE)), default=np.inf)
            / torch_bytes,
        }


def placed_by_torch(schedule: Schedule) -> Program:
    """The program with UNSHARD and RESHARD where torch puts them, and its one reduction per stage."""
    program, new = lower(schedule), list[tuple[Any, ...]]()
    for rank in range(program.num_ranks):
        rows, place = program.compute_rows(rank).tolist(), 0
        actions = [torch_schedules._Action.from_str(str(program.instruction(row))) for row in rows]
        for action in torch_schedules._add_unshard_reshard(list(actions), MOST_ACTIVE):
            if action.computation_type.name in ("UNSHARD", "RESHARD"):
                key = NewRows.before(rows[place]) if place < len(rows) else NewRows.after(rows[-1])
                new.append((key, rank, Op[action.computation_type.name], action.stage_index))
            else:
                place += 1
    key, rank, op, stage = map(np.array, zip(*new, strict=True))
    zeros = np.zeros(len(key), np.int64)
    return program.inserted(NewRows(key, rank, op, stage, zeros, zeros, stage))


def costs_of(num_stages: int, gather: float) -> Costs:
    """Of uneven stages, whose gathers and reductions take so many forwards."""
    sizes = np.array(WEIGHTS[:num_stages])
    each, exchange = (tuple((factor * sizes).tolist()) for factor in (1.0, gather))
    static, activation = (tuple((num_bytes * sizes).astype(int).tolist()) for num_bytes in (16e6, 2e6))
    return Costs(
        forward_s=each,
        backward_input_s=each,
        backward_weight_s=each,
        unshard_s=exchange,
        reduce_s=exchange,
        activation_bytes=activation,
        parameter_bytes=static,
        gradient_bytes=static,
        optimizer_bytes=static,
        shards=REPLICAS,
    )


def figures(program: Program, costs: Costs) -> tuple[float, float]:
    """Seconds of the step, and the most bytes of a rank."""
    timeline = simulate(program, costs)
    return timeline.step_s, float(max(np.add(timeline.peak_bytes, timeline.static_bytes)))
