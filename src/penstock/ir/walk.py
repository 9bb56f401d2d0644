"""The walk: runs the orders of all ranks at once, without knowing what the rows are.

A rank runs its rows in order; a row is ready when its predecessors have ended. Two joined rows start together. Used to
prove that an order can run, to time it, and to find a linear extension of all ranks' rows.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.ir.hot import Array, Bools, Hot, Int32s, Int64s, frozen

NOT_RUN = -1
BLOCKED = -2


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """When each row ran: times in the unit of the durations; `NOT_RUN` where a row never became ready."""

    start: Array
    end: Array
    reached: Int64s
    """[num_ranks] the first row that did not run, or the end of the rank's rows."""

    @property
    def is_complete(self) -> bool:
        return bool((self.end != NOT_RUN).all())


def walk(
    offsets: Array,
    predecessors: Int32s,
    joined: Bools,
    duration: Array,
    *,
    lag: NDArray[np.float64] | None = None,
    rank_order: Int64s | None = None,
    compiled: bool = False,
) -> Walk:
    """Return when each row starts and ends if every rank runs its rows in order, each row as early as it can.

    A row waits for the row before it on its rank, and for its predecessors on any rank. `offsets` [num_ranks + 1] says
    where each rank's rows begin. `predecessors` [num_rows, n] are row numbers, -1 for none. `joined` [num_rows] marks
    the first row of an overlapped pair, which runs together with the next row. `duration` [num_rows] may be whole
    numbers, and then all times are. `lag` [num_rows, k] is the time from the end of a predecessor until the row may
    start, for the first k columns of predecessors. Rows that can never run keep the time `NOT_RUN`.

    `rank_order` [num_ranks] is the order in which the loop visits ranks, and `compiled` asks for numba for a small
    table too: both change how fast the walk is, and no time.
    """
    num_rows = len(duration)
    lag_of_edge = np.zeros((num_rows, 0)) if lag is None else lag
    time_type = np.result_type(duration, np.int32)
    start, end = np.full((2, num_rows), NOT_RUN, time_type)
    result = Walk(start, end, offsets[:-1].astype(np.int64))
    visits = np.arange(len(offsets) - 1) if rank_order is None else rank_order
    # Ranks are visited there and back: results that travel against the order would else get one rank further per round.
    visits = np.concatenate([visits, visits[::-1]])
    rows = _Rows(*map(frozen, (offsets, predecessors, joined, duration, lag_of_edge, visits)))
    times = _Times(start, end, result.reached, np.zeros(len(offsets) - 1, time_type))
    if compiled:
        _WALK.compiled(rows, times)
    else:
        _WALK(num_rows, rows, times)
    return result


class _Rows(NamedTuple):
    """The columns of the rows, and the order in which ranks are visited."""

    offsets: Any
    predecessors: Any
    joined: Any
    duration: Any
    lag: Any
    rank_order: Any


class _Times(NamedTuple):
    """The findings of the walk: per row its start and end; per rank its next row, and when it is free for it."""

    start: Any
    end: Any
    reached: Any
    free: Any


def _ready_time(predecessors: Any, end: Any, lag: Any, row: int, partner: int) -> float:
    """When the row can start, or BLOCKED; it does not wait for the other row of its pair."""
    ready = 0
    num_lags = lag.shape[1]
    for column in range(predecessors.shape[1]):
        source = predecessors[row, column]
        if source < 0 or source == partner:
            continue
        ended = end[source]
        if ended == -1:  # NOT_RUN
            return -2  # BLOCKED
        if column < num_lags:
            ended += lag[row, column]
        if ended > ready:  # interpreted, a call of max takes longer than all of this
            ready = ended
    return ready


def _visit_all(rows: _Rows, times: _Times) -> bool:
    """Visit each rank once, and run its rows until one is blocked; return whether any row ran.

    The caller repeats rounds until none runs a row. This loop is one function on purpose: compiled, a call for each
    rank makes the walk take twice as long.
    """
    offsets, predecessors, joined, duration, lag, rank_order = rows
    start, end, reached, rank_free_at = times
    # One greedy walk is enough. A row waits for rows before it on its rank and for its predecessors. Both only ever get
    # an end, so a row that is ready stays ready, and its start, the latest of these ends, is the same whenever it is
    # visited. By induction over any order in which rows can run, every walk runs the same rows at the same times; these
    # are the earliest possible ones. A round costs one look at the first row of each blocked rank. Visiting ranks there
    # and back lets results travel along all ranks, of either direction, in one round.
    has_run = False
    for rank in rank_order:
        row = reached[rank]
        end_row = offsets[rank + 1]
        free_at = rank_free_at[rank]
        while row < end_row:
            # A pair is ready when both rows are. It occupies the rank for the sum of their durations, and neither has a
            # result before the end of both.
            last = row + 1 if joined[row] else row
            ready = _ready_time(predecessors, end, lag, row, last)
            if last > row and ready >= 0:
                partner_ready = _ready_time(predecessors, end, lag, last, row)
                ready = max(ready, partner_ready) if partner_ready >= 0 else partner_ready
            if ready < 0:  # BLOCKED
                break
            begin = ready if ready > free_at else free_at
            free_at = begin + duration[row]
            if last > row:
                free_at += duration[last]
                start[last] = begin
                end[last] = free_at
            start[row] = begin
            end[row] = free_at
            row = last + 1
        if row != reached[rank]:
            reached[rank] = row
            rank_free_at[rank] = free_at
            has_run = True
    return has_run


def _walk_all(rows: _Rows, times: _Times) -> None:
    # A row that is ready stays ready, so the order of ranks decides the number of rounds, never the times. A round in
    # which no row ran is the end: either all ran, or the rows that are left wait for each other in a cycle.
    while _visit_all(rows, times):
        pass


_WALK = Hot(_walk_all, _visit_all, _ready_time)
