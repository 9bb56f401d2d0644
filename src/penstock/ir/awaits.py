"""What a row waits for that an earlier row of its rank has launched: a message, or the gather of its stage's weights.

    1RECV_F0 0UNSHARD 1F0      1F0 awaits 1RECV_F0      0F0 ... awaits 0UNSHARD

A receive or a gather itself returns at once. The rows that await it are the first that need what it brings.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.ir.deps import NONE
from penstock.ir.operations import IS_COMPUTE, IS_RECEIVE, Op
from penstock.ir.program import Program


def receive_of_row(program: Program, before: NDArray[np.int32]) -> NDArray[np.int32]:
    """[num_rows] the receive whose message a computation waits for; `before` is column 0 of its predecessors."""
    is_awaiting = IS_COMPUTE[program.op] & (before != NONE)
    is_awaiting[is_awaiting] = IS_RECEIVE[program.op[before[is_awaiting]]]
    return np.where(is_awaiting, before, np.int32(NONE))


def launched_before(program: Program) -> list[NDArray[np.int64]]:
    """[num_rows] each, what computations wait for that runs beside those of their rank."""
    return [gather_of_row(program)]


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
