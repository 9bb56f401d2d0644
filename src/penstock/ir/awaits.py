"""What a row waits for that an earlier row of its rank has launched: a message, a gather, a reload, a reduction.

    1RECV_F0 0UNSHARD 1F0 ... 0F0 ... 0RELOAD0 0F3 0B0 ... 0REDUCE_GRAD 1REDUCE_GRAD 0REDUCE_TIED0 STEP
        1F0 awaits 1RECV_F0, 0F0 awaits 0UNSHARD, 0B0 awaits 0RELOAD0, 0REDUCE_TIED0 awaits both reductions

What launches returns at once. The rows that await it are the first that need what it brings.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.ir.deps import NONE, predecessors
from penstock.ir.operations import IS_COMPUTE, IS_COPY, IS_RECEIVE, JOINS_RANKS, OPERATIONS, Group, Op, Value
from penstock.ir.program import Program


def receive_of_row(program: Program, before: NDArray[np.int32]) -> NDArray[np.int32]:
    """[num_rows] the receive whose message a computation waits for; `before` is column 0 of its predecessors."""
    is_awaiting = IS_COMPUTE[program.op] & (before != NONE)
    is_awaiting[is_awaiting] = IS_RECEIVE[program.op[before[is_awaiting]]]
    return np.where(is_awaiting, before, np.int32(NONE))


def launched_before(program: Program) -> list[NDArray[np.int64]]:
    """[num_rows] each, what computations wait for that runs beside those of their rank: gathers, then reloads."""
    return [gather_of_row(program), *([reload_of_row(program)] if len(program.rows_of(IS_COPY)) else [])]


def gather_of_row(program: Program) -> NDArray[np.int64]:
    """[num_rows] the gather that a computation waits for, the last one before the first of its stage behind it."""
    found = np.full(program.num_rows, NONE, np.int64)
    gathers, computes = np.flatnonzero(program.op == Op.UNSHARD), program.compute_rows()
    # One sorted column of computations, stage after stage; a stage is on one rank, so rows tell earlier from later.
    stage = program.stage.astype(np.int64)
    keys = np.sort(stage[computes] * program.num_rows + computes)
    places = np.searchsorted(keys, stage[gathers] * program.num_rows + gathers)
    is_inside = places < len(keys)
    rows, gathers = keys[places[is_inside]] % program.num_rows, gathers[is_inside]
    is_same = stage[rows] == stage[gathers]
    found[rows[is_same]] = gathers[is_same]
    return found


def reload_of_row(program: Program) -> NDArray[np.int64]:
    """[num_rows] the row that has brought back what a computation reads."""
    found = np.full(program.num_rows, NONE, np.int64)
    for before in predecessors(program).T:
        is_copied = before != NONE
        is_copied[is_copied] = IS_COPY[program.op[before[is_copied]]]
        found[is_copied] = before[is_copied]
    return found


def reductions_of_row(program: Program, rank: int) -> dict[int, list[int]]:
    """Per row of a rank that joins ranks of its pipeline: the reductions over replicas launched since the last one."""
    first, end = map(int, program.offsets[rank : rank + 2])
    ops = program.op[first:end]
    found: dict[int, list[int]] = {}
    launched: list[int] = []
    for row in (first + np.flatnonzero(JOINS_RANKS[ops] | np.isin(ops, _REDUCTIONS))).tolist():
        if JOINS_RANKS[program.op[row]]:
            found[row], launched = launched, []
        else:
            launched.append(row)
    return found


_REDUCTIONS = [
    op
    for op, operation in OPERATIONS.items()
    if operation.group is Group.REPLICAS and any(read.value is Value.GRADIENT for read in operation.reads)
]
