"""Queues beside the ranks, in which messages and collectives wait for one another while their rank goes on.

    rank 0      F0  SEND_F0  F1  SEND_F1  ...          the rows of the program
    0 -> 1          [ F0 on the wire ][ F1 on the wire ]   a queue: its rows run in order, each after its send

To the walk (`ir.walk`) a queue is one more rank: its rows follow those of the program, queue after queue.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.deps import NONE
from penstock.ir.program import Program
from penstock.ir.timeline import Floats
from penstock.ir.walk import Walk, walk

Rows = NDArray[np.int64]


class Queues:
    """Collects queues, numbers their rows, and walks them together with the ranks of a program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._columns_of_calls: list[tuple[Rows, Rows, NDArray[np.int32], Floats]] = []
        """The lengths of the queues, and the columns of their rows, from each call of `add`."""
        self.next_row = program.num_instructions
        """The number that the first row of the next queue will have."""
        self.ended_by_queues: list[tuple[Rows, Rows]] = []
        """Rows of the program that end when a row of a queue does, and these rows of queues."""

    def add(
        self, lengths: Rows, *, after: Rows, duration_s: Floats, and_after: NDArray[np.int32] | None = None
    ) -> Rows:
        """Add queues of these lengths and return the numbers of their rows.

        Each row comes after one row, which may be of a later queue, and after one row of the program, if any.
        """
        if and_after is None:
            and_after = np.full(len(after), NONE, np.int32)
        self._columns_of_calls.append((lengths, after, and_after, duration_s))
        self.next_row += len(after)
        return np.arange(self.next_row - len(after), self.next_row)

    def walk(
        self,
        predecessors: Sequence[NDArray[np.int32]],
        duration_s: Floats,
        lag_s: Floats,
        *,
        num_lagged: int = 1,
        compiled: bool = False,
    ) -> Walk:
        """Return the start and end of every row: of the program's instructions, then of all rows that `add` made.

        A queue models a link or a stream: messages or collectives that run one after another, beside their rank.
        `predecessors` are columns [num_instructions] of rows; a row starts after the end of its entry in each of them.
        In the first `num_lagged` columns it starts `lag_s` [num_instructions] seconds after that end. `duration_s`
        [num_instructions] is how long each instruction takes. `compiled` runs numba's loop for a small table, too.
        """
        program = self._program
        offsets, joined, rank_order = program.offsets, program.joined, None
        num_added = self.next_row - program.num_instructions
        if num_added:
            # A queue becomes one more rank of the walk: its rows stand behind those of the program, run in order, and
            # wait for one or two further rows without a lag. So the first two columns of predecessors are extended by
            # these rows and all further columns by `NONE`; zip leaves out the columns that are too many.
            lengths, after, and_after, busy_s = map(np.concatenate, zip(*self._columns_of_calls, strict=True))
            no_rows = np.full(num_added, NONE, np.int32)
            queue_columns = [after.astype(np.int32), and_after, *[no_rows] * len(predecessors)]
            predecessors = [np.concatenate(pair) for pair in zip(predecessors, queue_columns, strict=False)]
            offsets = np.concatenate([offsets, program.num_instructions + np.cumsum(lengths)])
            joined, rank_order = np.concatenate([joined, np.zeros(num_added, np.bool_)]), self._order_of_visits()
            duration_s = np.concatenate([duration_s, busy_s])
            lag_s = np.concatenate([lag_s, np.zeros(num_added)])
        predecessor_table, lag = _side_by_side(predecessors), _side_by_side([lag_s] * num_lagged)
        return walk(offsets, predecessor_table, joined, duration_s, lag=lag, rank_order=rank_order, compiled=compiled)

    def _order_of_visits(self) -> Rows:
        """Return the ranks and queues, each queue right after the rank that fills it.

        So one round of the walk takes a message from end to end.
        """
        program = self._program
        parts = [_first_after(lengths, after) for lengths, after, *_ in self._columns_of_calls]
        # A queue that another queue fills has a row past all ranks here, and so comes after them.
        fillers = np.searchsorted(program.offsets, np.concatenate(parts), side="right") - 1
        return np.argsort(np.concatenate([np.arange(program.num_ranks), fillers]), kind="stable")


def _side_by_side(columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """[num_rows, num_columns]"""
    return np.stack(columns, axis=1) if len(columns) > 1 else columns[0].reshape(-1, 1)


def _first_after(lengths: Rows, after: Rows) -> Rows:
    """[num_queues] the row that the first row of each queue comes after; 0 for a queue without rows."""
    first_after = np.zeros(len(lengths), np.int64)
    has_rows = lengths > 0
    first_after[has_rows] = after[(np.cumsum(lengths) - lengths)[has_rows]]
    return first_after
