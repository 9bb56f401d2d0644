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
        self._parts: list[tuple[Rows, Rows, NDArray[np.int32], Floats]] = []
        """Added by the calls of `add`."""
        self.next_row = program.num_instructions
        """The number that the first row of the next queue will have."""
        self.outlasting: list[tuple[Rows, Rows]] = []
        """Rows of the program that are over when a row of a queue is, and these rows."""

    def add(
        self, lengths: Rows, *, after: Rows, duration_s: Floats, and_after: NDArray[np.int32] | None = None
    ) -> Rows:
        """Add queues of these lengths and return the numbers of their rows.

        Each row comes after one row, which may be of a later queue, and after one row of the program, if any.
        """
        alone = np.full(len(after), NONE, np.int32)
        self._parts.append((lengths, after, alone if and_after is None else and_after, duration_s))
        self.next_row += len(after)
        return np.arange(self.next_row - len(after), self.next_row)

    def walk(
        self,
        before: Sequence[NDArray[np.int32]],
        duration_s: Floats,
        lag_s: Floats,
        *,
        num_lagged: int = 1,
        compiled: bool = False,
    ) -> Walk:
        """Time the program's rows and those of all queues.

        Each entry of `before` holds, for every row of the program, one more row that it comes after; `lag_s` is the
        time from the end of each of the first `num_lagged` of these until the row may start.
        """
        program = self._program
        offsets, joined, rank_order = program.offsets, program.joined, None
        num_added = self.next_row - program.num_instructions
        if num_added:
            # Each row of a queue waits for one row or two, without a lag, and for the queue's rows before it.
            lengths, after, and_after, busy_s = map(np.concatenate, zip(*self._parts, strict=True))
            nothing = np.full(num_added, NONE, np.int32)
            added = [after.astype(np.int32), and_after, *[nothing] * len(before)]
            before = [np.concatenate(pair) for pair in zip(before, added, strict=False)]
            offsets = np.concatenate([offsets, program.num_instructions + np.cumsum(lengths)])
            joined, rank_order = np.concatenate([joined, np.zeros(num_added, np.bool_)]), self._rank_order()
            duration_s = np.concatenate([duration_s, busy_s])
            lag_s = np.concatenate([lag_s, np.zeros(num_added)])
        rows, lag = _table(before), _table([lag_s] * num_lagged)
        return walk(offsets, rows, joined, duration_s, lag=lag, rank_order=rank_order, compiled=compiled)

    def _rank_order(self) -> Rows:
        """Each queue right after the rank that fills it: so one round takes a message from end to end."""
        program = self._program
        parts = [_first_after(lengths, after) for lengths, after, *_ in self._parts]
        # A queue that another queue fills has a row past all ranks here, and so comes after them.
        fillers = np.searchsorted(program.offsets, np.concatenate(parts), side="right") - 1
        return np.argsort(np.concatenate([np.arange(program.num_ranks), fillers]), kind="stable")


def _table(columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.stack(columns, axis=1) if len(columns) > 1 else columns[0].reshape(-1, 1)


def _first_after(lengths: Rows, after: Rows) -> Rows:
    """Per queue, what its first row comes after; 0 where it has no rows."""
    firsts = np.zeros(len(lengths), np.int64)
    is_used = lengths > 0
    firsts[is_used] = after[(np.cumsum(lengths) - lengths)[is_used]]
    return firsts
