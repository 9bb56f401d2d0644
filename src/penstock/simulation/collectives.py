"""Collectives run beside the computations: each rank has a queue for them, in the order in which it launches them.

    rank 0     UNSHARD  .  .  F0  B0  REDUCE_GRAD  F1 ...  STEP     F0 waits for the gather, STEP for the reductions
    its queue   [ gather    ]          [ reduction        ]

A tied reduction starts when all members have launched it and are done with what they launched before: each member has a
row of no length in its queue, an arrival, and a meeting, one more queue, is over when all arrivals are.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.ir.deps import NONE
from penstock.ir.instruction import Op
from penstock.ir.program import Program
from penstock.simulation.costs.costs import Costs
from penstock.simulation.queues import Queues, Rows

REDUCTIONS = (Op.REDUCE_GRADIENT, Op.REDUCE_TIED)
ON_A_QUEUE = (Op.UNSHARD, *REDUCTIONS)


@dataclass(frozen=True, slots=True, eq=False)
class Collectives:
    """The instructions that launch collectives, and the row of its queue in which each runs."""

    launches: Rows
    runs: Rows


@dataclass(frozen=True, slots=True, eq=False)
class _Meetings:
    """One queue per tied group, with one row per member."""

    lengths: Rows
    after: Rows
    over: Rows
    """Per member, in the order in which they were given: the row that is over when all have arrived."""


def add_collectives(program: Program, costs: Costs, before: NDArray[np.int32], queues: Queues) -> Collectives:
    """Put the collectives on queues, and let optimizer steps wait for reductions, in `before`."""
    launches = np.flatnonzero(np.isin(program.op, ON_A_QUEUE))
    seconds = _seconds(program, costs, launches)
    if not seconds.any() and Op.REDUCE_TIED not in program.op[launches]:
        nowhere: Rows = np.empty(0, np.int64)
        return Collectives(nowhere, nowhere)
    is_tied = program.op[launches] == Op.REDUCE_TIED
    first = queues.next_row
    # A tied reduction has two rows in its queue, its arrival and itself.
    runs = first + np.cumsum(1 + is_tied) - 1
    arrivals = runs[is_tied] - 1
    num_rows = len(launches) + len(arrivals)
    meetings = _meet(program.peer[launches[is_tied]], arrivals, first + num_rows)
    after, duration_s = np.empty(num_rows, np.int64), np.zeros(num_rows)
    after[runs - first], duration_s[runs - first] = launches, seconds
    after[arrivals - first], after[runs[is_tied] - first] = launches[is_tied], meetings.over
    lengths = np.bincount(program.rank_of_row[launches], 1 + is_tied, program.num_ranks).astype(np.int64)
    queues.add(lengths, after=after, duration_s=duration_s)
    queues.add(meetings.lengths, after=meetings.after, duration_s=np.zeros(len(arrivals)))
    found = Collectives(launches, runs)
    _let_steps_wait(program, found, before)
    return found


def _meet(groups: NDArray[np.int32], arrivals: Rows, first: int) -> _Meetings:
    in_order = np.argsort(groups, kind="stable")
    _, index, counts = np.unique(groups, return_inverse=True, return_counts=True)
    return _Meetings(counts, arrivals[in_order], first + np.cumsum(counts)[index] - 1)


def gather_of_row(program: Program) -> NDArray[np.int64]:
    """[num_instructions] the UNSHARD that a computation waits for, the last one before the first of its stage."""
    found = np.full(program.num_instructions, NONE, np.int64)
    gathers, computes = np.flatnonzero(program.op == Op.UNSHARD), np.flatnonzero(program.is_compute)
    # One sorted column of computations, stage after stage; a stage lies on one rank, so rows tell earlier from later.
    stage = program.stage.astype(np.int64)
    keys = np.sort(stage[computes] * program.num_instructions + computes)
    places = np.searchsorted(keys, stage[gathers] * program.num_instructions + gathers)
    is_inside = places < len(keys)
    rows, gathers = keys[places[is_inside]] % program.num_instructions, gathers[is_inside]
    is_same = stage[rows] == stage[gathers]
    found[rows[is_same]] = gathers[is_same]
    return found


def gathers_before(program: Program, collectives: Collectives) -> NDArray[np.int32] | None:
    """[num_instructions] the rows of queues in which the gathers run that computations wait for; None without any."""
    if not (program.op[collectives.launches] == Op.UNSHARD).any():
        return None
    gathers = gather_of_row(program)
    waiting = np.flatnonzero(gathers != NONE)
    column = np.full(program.num_instructions, NONE, np.int32)
    column[waiting] = collectives.runs[np.searchsorted(collectives.launches, gathers[waiting])]
    return column


def _seconds(program: Program, costs: Costs, launches: Rows) -> NDArray[np.float64]:
    table = np.zeros((len(Op), program.num_stages))
    table[Op.UNSHARD] = costs.per_stage("unshard_s", program.num_stages)
    table[Op.REDUCE_GRADIENT] = costs.per_stage("reduce_s", program.num_stages)
    seconds = table[program.op[launches], program.stage[launches]]
    if program.tied_groups:
        tied = program.op[launches] == Op.REDUCE_TIED
        seconds[tied] = costs.per_tied_group(len(program.tied_groups))[program.peer[launches[tied]]]
    return np.asarray(seconds)


def _let_steps_wait(program: Program, collectives: Collectives, before: NDArray[np.int32]) -> None:
    """Let each optimizer step wait for the last reduction that its rank has launched."""
    steps = np.flatnonzero(program.op == Op.OPTIMIZER_STEP)
    is_reduction = np.isin(program.op[collectives.launches], REDUCTIONS)
    reductions, runs = collectives.launches[is_reduction], collectives.runs[is_reduction]
    if not len(reductions):
        return
    last = np.searchsorted(reductions, steps) - 1
    rank_of_row = program.rank_of_row
    waits = (last >= 0) & (rank_of_row[reductions[last]] == rank_of_row[steps])
    before[steps[waits]] = runs[last[waits]]
