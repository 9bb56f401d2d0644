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
    stage: int
    duration_s: float
    """It took no longer."""
    is_awaited: bool
    """Whether the rank waited for its end."""


def exchanges_s(timelines: Sequence[Timeline]) -> dict[Op, Floats]:
    """Return what gathers and reductions take, each [num_stages]; 0 for stages that have none.

    Where no rank waited for one, it takes as long as others in the mean; a reduction as long as the gather of its
    stage, if all others are unknown too.
    """
    program = timelines[0].program
    found = {op: np.full(program.num_stages, np.nan) for op in _OPS}
    samples = [sample for timeline in timelines for sample in _samples(timeline)]
    for op, stage in {(op, sample.stage) for op, sample in samples}:
        own = [sample for each, sample in samples if (each, sample.stage) == (op, stage)]
        if any(sample.is_awaited for sample in own):
            found[op][stage] = min(sample.duration_s for sample in own)
    for op, seconds in found.items():
        is_run = np.isin(np.arange(program.num_stages), program.stage[program.op == op])
        if not np.isnan(seconds).all():
            seconds[is_run & np.isnan(seconds)] = np.nanmean(seconds)
        elif op == Op.REDUCE_GRADIENT:
            seconds[is_run] = found[Op.UNSHARD][is_run]
    return {op: np.nan_to_num(seconds) for op, seconds in found.items()}


def _samples(timeline: Timeline) -> Iterator[tuple[Op, _Sample]]:
    """All gathers and reductions of all ranks."""
    program, sees_ends = timeline.program, timeline.source != "measured"
    waits_s = _waits_s(timeline)
    for first, end in pairwise(program.offsets.tolist()):
        rows = first + np.flatnonzero(_IS_EXCHANGE[program.op[first:end]])
        before_s, is_before_true = -np.inf, True
        for row in rows.tolist():
            start_s, end_s = float(timeline.start_s[row]), float(timeline.end_s[row])
            # Where the end of the one before is not known, this one may have begun at its launch.
            duration_s = end_s - (max(start_s, before_s) if is_before_true else start_s)
            free_s = waits_s.get(row, start_s)
            is_awaited = sees_ends or free_s <= start_s or end_s - free_s > AWAITED * duration_s
            yield Op(int(program.op[row])), _Sample(int(program.stage[row]), duration_s, is_awaited)
            before_s, is_before_true = end_s, is_awaited


def _waits_s(timeline: Timeline) -> dict[int, float]:
    """When a rank began to wait for each exchange that did not hold it up where it was launched."""
    program = timeline.program
    blocking = set(blocking_reductions(timeline).tolist())
    launches, gathers = IS_RECEIVE | _IS_EXCHANGE, gather_of_row(program)
    found: dict[int, float] = {}
    for rank, (first, end) in enumerate(pairwise(program.offsets.tolist())):
        awaited = reductions_of_row(program, rank)
        awaited |= {row: [int(gathers[row])] for row in range(first, end) if gathers[row] != NONE}
        seen = {each for rows in awaited.values() for each in rows}
        # The last row is over where it is launched, or the end of the program waits for it.
        held_up = blocking - {end - 1}
        awaited[end] = [row for row in range(first, end) if _IS_EXCHANGE[program.op[row]] and row not in seen]
        for row, launched in awaited.items():
            is_beside = launches[program.op[row - 1]]
            free_s = float((timeline.start_s if is_beside else timeline.end_s)[row - 1])
            waited = [each for each in launched if each not in held_up]
            ends_s = np.maximum.accumulate([free_s, *timeline.end_s[waited]])
            found |= zip(waited, ends_s.tolist(), strict=False)
    return found
