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
    """Run every rank's rows in order, each as early as its predecessors allow.

    `offsets` [num_ranks + 1], `predecessors` [num_rows, n] with -1 for none, `duration` [num_rows], and where these are
    whole numbers, so are all times. `lag` [num_rows, k]
    is the time from the end of a predecessor until the row may start, for the first k columns of predecessors; the
    others have none. `rank_order` [num_ranks] is the order in which ranks are looked at again and again, and `compiled`
    asks for compiled loops for a small table too: both change nothing but how fast the walk is.
    """
    num_rows = len(duration)
    lag_of_edge = np.zeros((num_rows, 0)) if lag is None else lag
    of_time = np.result_type(duration, np.int32)
    start, end = np.full((2, num_rows), NOT_RUN, of_time)
    result = Walk(start, end, offsets[:-1].astype(np.int64))
    turns = np.arange(len(offsets) - 1) if rank_order is None else rank_order
    # There and back, since what goes against the turns would get one rank further in each round.
    turns = np.concatenate([turns, turns[::-1]])
    rows = _Rows(*map(frozen, (offsets, predecessors, joined, duration, lag_of_edge, turns)))
    times = _Times(start, end, result.reached, np.zeros(len(offsets) - 1, of_time))
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
    """Run rows of each rank until one is blocked; return whether any ran.

    This loop is one function on purpose: compiled, a call for each rank makes the walk take twice as long.
    """
    offsets, predecessors, joined, duration, lag, rank_order = rows
    start, end, reached, free = times
    # Why one greedy pass is enough: a row waits for rows before it on its rank and for its predecessors. Both only
    # ever get an end, so a row that is ready stays ready, and its start, the latest of these ends, is the same
    # whenever it is visited. By induction over any order in which rows can run, every walk runs the same rows at the
    # same times; these are the earliest possible ones. A round costs one look at the first row of each blocked rank.
    # Visiting ranks there and back lets results travel along all ranks, of either direction, in one round.
    has_run = False
    for rank in rank_order:
        row = reached[rank]
        stop = offsets[rank + 1]
        rank_free = free[rank]
        while row < stop:
            # A pair is ready when both rows are. It occupies the rank for the sum of their durations, and neither has a
            # result before the end of both.
            last = row + 1 if joined[row] else row
            ready = _ready_time(predecessors, end, lag, row, last)
            if last > row and ready >= 0:
                partner_ready = _ready_time(predecessors, end, lag, last, row)
                ready = max(ready, partner_ready) if partner_ready >= 0 else partner_ready
            if ready < 0:  # BLOCKED
                break
            begin = ready if ready > rank_free else rank_free
            rank_free = begin + duration[row]
            if last > row:
                rank_free += duration[last]
                start[last] = begin
                end[last] = rank_free
            start[row] = begin
            end[row] = rank_free
            row = last + 1
        if row != reached[rank]:
            reached[rank] = row
            free[rank] = rank_free
            has_run = True
    return has_run


def _walk_all(rows: _Rows, times: _Times) -> None:
    # A row that is ready stays ready, so the order of ranks decides the number of rounds, never the times. A round in
    # which no row ran is the end: either all ran, or the rows that are left wait for each other in a cycle.
    while _visit_all(rows, times):
        pass


_WALK = Hot(_walk_all, _visit_all, _ready_time)
