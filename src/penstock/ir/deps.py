"""What comes before what: the rows that must be done before a row can start, for schedules and programs alike.

    F(s, b, q)   after F(s-1, b, q) or its receive, and F(s, b, q-1)       keys and values of earlier slices
    B|I(s, b, q) after B|I(s+1, b, q) or its receive, F(s, b, q), and B|I(s, b, q+1)
    W(s, b, q)   after I(s, b, q)
    send         after the action that makes the message;  receive after its send

s-1 and s+1 are the neighbours on the microbatch's route. What stands earlier on the same rank is not repeated here.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.instruction import Op
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule

NUM_PREDECESSORS = 3
NONE = -1
"""Stands for "no such row" in tables of rows."""


@dataclass(frozen=True, slots=True, eq=False)
class RowIndex:
    """Where each (stage, microbatch, slice) is computed, sent and received: tables of rows, `NONE` where nowhere.

    Entries outside the schedule's ranges are left out; of duplicates the last one counts. Both are for `check` to find.
    """

    forward: NDArray[np.int32]
    backward: NDArray[np.int32]
    """Whole backward or input part."""
    weight: NDArray[np.int32]
    """Weight part."""
    send_forward: NDArray[np.int32]
    receive_forward: NDArray[np.int32]
    send_backward: NDArray[np.int32]
    receive_backward: NDArray[np.int32]


def index_rows(table: Schedule | Program) -> RowIndex:
    """Find the row of every action (and message) of the table."""
    op = _ops(table)
    shape = (table.num_stages, table.num_microbatches, table.num_slices)
    inside = (table.stage < shape[0]) & (table.microbatch < shape[1]) & (table.slice < shape[2])
    locate = partial(_locate, table, op, inside, shape)
    return RowIndex(
        forward=locate(Op.FORWARD),
        backward=locate(Op.BACKWARD, Op.BACKWARD_INPUT),
        weight=locate(Op.BACKWARD_WEIGHT),
        send_forward=locate(Op.SEND_FORWARD),
        receive_forward=locate(Op.RECEIVE_FORWARD),
        send_backward=locate(Op.SEND_BACKWARD),
        receive_backward=locate(Op.RECEIVE_BACKWARD),
    )


def predecessors(table: Schedule | Program, rows: RowIndex | None = None) -> NDArray[np.int32]:
    """Return [num_rows, 3] the rows that each row waits for, `NONE` where there are fewer.

    Column 0 is where the data comes from, column 1 the saved activation (or earlier slice), column 2 the later slice.
    """
    found = index_rows(table) if rows is None else rows
    op = _ops(table)
    result = np.full((len(op), NUM_PREDECESSORS), NONE, np.int32)
    look = _Lookup(table, op, result)

    for code in (Op.FORWARD, Op.RECEIVE_FORWARD):
        look.previous_stage(code, found.send_forward if code is Op.RECEIVE_FORWARD else found.forward)
    for code in (Op.BACKWARD, Op.BACKWARD_INPUT, Op.RECEIVE_BACKWARD):
        look.next_stage(code, found.send_backward if code is Op.RECEIVE_BACKWARD else found.backward)
    look.same_stage(Op.FORWARD, found.receive_forward, 0)
    look.same_stage(Op.SEND_FORWARD, found.forward, 0)
    look.same_stage(Op.SEND_BACKWARD, found.backward, 0)
    look.same_stage(Op.BACKWARD_WEIGHT, found.backward, 0)
    look.same_stage(Op.FORWARD, found.forward, 1, slice_shift=-1)
    for code in (Op.BACKWARD, Op.BACKWARD_INPUT):
        look.same_stage(code, found.receive_backward, 0)
        look.same_stage(code, found.forward, 1)
        look.same_stage(code, found.backward, 2, slice_shift=+1)
    return result


def _ops(table: Schedule | Program) -> NDArray[Any]:
    return table.kind if isinstance(table, Schedule) else table.op


def _locate(
    table: Schedule | Program,
    op: NDArray[Any],
    inside: NDArray[np.bool_],
    shape: tuple[int, int, int],
    *codes: Op,
) -> NDArray[np.int32]:
    if isinstance(table, Schedule) and codes[0] > Op.BACKWARD_WEIGHT:
        return np.full((1, 1, 1), NONE, np.int32)
    where = np.full(shape, NONE, np.int32)
    rows = np.flatnonzero(inside & np.isin(op, codes))
    where[table.stage[rows], table.microbatch[rows], table.slice[rows]] = rows
    return where


class _Lookup:
    """Fills columns of the result for all rows of one operation at once."""

    def __init__(self, table: Schedule | Program, op: NDArray[Any], result: NDArray[np.int32]) -> None:
        self.table = table
        self.op = op
        self.result = result
        self.previous = np.array(table.placement.previous_stage, np.int32)
        self.next = np.array(table.placement.next_stage, np.int32)

    def previous_stage(self, code: Op, where: NDArray[np.int32]) -> None:
        self._neighbour(code, where, self.previous)

    def next_stage(self, code: Op, where: NDArray[np.int32]) -> None:
        self._neighbour(code, where, self.next)

    def _neighbour(self, code: Op, where: NDArray[np.int32], neighbour: NDArray[np.int32]) -> None:
        rows = self._rows(code, where)
        stages = neighbour[self.table.stage[rows]]
        there = stages != NONE
        self._fill(rows[there], where, stages[there], 0, 0)

    def same_stage(self, code: Op, where: NDArray[np.int32], column: int, *, slice_shift: int = 0) -> None:
        rows = self._rows(code, where)
        self._fill(rows, where, self.table.stage[rows], column, slice_shift)

    def _rows(self, code: Op, where: NDArray[np.int32]) -> NDArray[np.intp]:
        if where.shape[0] != self.table.num_stages:  # nothing of this sort in the table
            return np.empty(0, np.intp)
        table = self.table
        inside = (table.stage < where.shape[0]) & (table.microbatch < where.shape[1]) & (table.slice < where.shape[2])
        return np.flatnonzero((self.op == code) & inside)

    def _fill(
        self, rows: NDArray[np.intp], where: NDArray[np.int32], stages: NDArray[Any], column: int, slice_shift: int
    ) -> None:
        slices = self.table.slice[rows] + slice_shift
        there = (slices >= 0) & (slices < where.shape[2])
        rows, stages, slices = rows[there], stages[there], slices[there]
        before = where[stages, self.table.microbatch[rows], slices]
        # A receive, where there is one, takes the place of the neighbour's action.
        self.result[rows, column] = np.where(before == NONE, self.result[rows, column], before)
