"""The time of gathers and reductions over replicas by themselves, as far as recorded steps show it.

    rank     0UNSHARD 1UNSHARD |wait for 0|0F0 |wait for 1|1F0
    lane     [ gather of stage 0         ][ gather of stage 1 ]

A rank notes the end of an exchange when it waits for it: the true end if it waited for long, a later moment if the
exchange was over by then. The exchanges of a rank follow one another, so one begins where it is launched, or where the
one before is over. Waiting for replicas that are late belongs to no exchange: of several measurements the shortest
counts. `train.measuring.exchanges` measures them by themselves.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.ir.awaits import gather_of_row, reductions_of_row
from penstock.ir.collectives import GATHERS, REDUCES_REPLICAS
from penstock.ir.deps import NONE
from penstock.ir.operations import IS_RECEIVE, Op
from penstock.ir.timeline import Floats, Timeline
from penstock.simulation.blocks import blocking_reductions

AWAITED = 0.5
"""The share of its seconds for which a rank waits at least for an exchange whose end it sees."""
_OPS = (Op.UNSHARD, Op.REDUCE_GRADIENT)
_IS_EXCHANGE = GATHERS | REDUCES_REPLICAS


class _Sample(NamedTuple):
    """The findings of a step on one exchange."""

    stage: int
    duration_s: float
    """The most seconds that the exchange can have taken."""
    is_awaited: bool
    """Whether the rank waited for the end of the exchange, so that it took no less either."""


def exchanges_s(timelines: Sequence[Timeline]) -> dict[Op, Floats]:
    """Return what gathers and reductions take, each [num_stages]; 0 for stages that have none.

    Where no rank waited for one, it takes as long as others in the mean; a reduction as long as the gather of its
    stage, if all others are unknown too.
    """
    program = timelines[0].program
    samples: dict[tuple[Op, int], list[_Sample]] = {}
    for timeline in timelines:
        for op, sample in _samples(timeline):
            samples.setdefault((op, sample.stage), []).append(sample)
    seconds_by_op = {op: np.full(program.num_stages, np.nan) for op in _OPS}  # NaN where no rank waited for one
    for (op, stage), samples_of_stage in samples.items():
        if any(sample.is_awaited for sample in samples_of_stage):
            seconds_by_op[op][stage] = min(sample.duration_s for sample in samples_of_stage)
    for op, seconds in seconds_by_op.items():
        runs = np.isin(np.arange(program.num_stages), program.stage[program.op == op])
        if not np.isnan(seconds).all():
            seconds[runs & np.isnan(seconds)] = np.nanmean(seconds)
        elif op == Op.REDUCE_GRADIENT:
            seconds[runs] = seconds_by_op[Op.UNSHARD][runs]
    return {op: np.nan_to_num(seconds) for op, seconds in seconds_by_op.items()}


def _samples(timeline: Timeline) -> Iterator[tuple[Op, _Sample]]:
    """Yield all gathers and reductions of all ranks, in the order in which they run on their rank."""
    program, sees_ends = timeline.program, timeline.source != "measured"
    waits_s = _waits_s(timeline)
    for first, end in pairwise(program.offsets.tolist()):
        rows = first + np.flatnonzero(_IS_EXCHANGE[program.op[first:end]])
        previous_end_s, is_previous_true = -np.inf, True
        for row in rows.tolist():
            start_s, end_s = float(timeline.start_s[row]), float(timeline.end_s[row])
            # Where the true end of the exchange before is not known, this one may have begun at its launch.
            duration_s = end_s - (max(start_s, previous_end_s) if is_previous_true else start_s)
            free_s = waits_s.get(row, start_s)
            is_awaited = sees_ends or free_s <= start_s or end_s - free_s > AWAITED * duration_s
            yield Op(int(program.op[row])), _Sample(int(program.stage[row]), duration_s, is_awaited)
            previous_end_s, is_previous_true = end_s, is_awaited


def _waits_s(timeline: Timeline) -> dict[int, float]:
    """Return when a rank began to wait for each exchange, by row, that did not hold it up where it was launched."""
    program = timeline.program
    blocking = set(blocking_reductions(timeline).tolist())
    is_launch, gathers = IS_RECEIVE | _IS_EXCHANGE, gather_of_row(program)
    wait_begin_s: dict[int, float] = {}
    for rank, (first, end) in enumerate(pairwise(program.offsets.tolist())):
        # By the row that waits, the exchanges that it waits for; the end of the program waits for those of no row.
        exchanges_of_row = reductions_of_row(program, rank)
        exchanges_of_row |= {row: [int(gathers[row])] for row in range(first, end) if gathers[row] != NONE}
        awaited = {exchange for exchanges in exchanges_of_row.values() for exchange in exchanges}
        rows = range(first, end)
        exchanges_of_row[end] = [row for row in rows if _IS_EXCHANGE[program.op[row]] and row not in awaited]
        # The last row is over where it is launched, or the end of the program waits for it.
        blocking_before_end = blocking - {end - 1}
        for row, exchanges in exchanges_of_row.items():
            # A row that only launches work leaves its rank free at its start; any other one at its end.
            is_free_at_start = is_launch[program.op[row - 1]]
            free_s = float((timeline.start_s if is_free_at_start else timeline.end_s)[row - 1])
            pending = [exchange for exchange in exchanges if exchange not in blocking_before_end]
            # The rank waits for them one after the other, and for each from when the one before was over.
            begins_s = np.maximum.accumulate([free_s, *timeline.end_s[pending]])
            wait_begin_s |= zip(pending, begins_s.tolist(), strict=False)
    return wait_begin_s
