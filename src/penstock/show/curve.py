"""The memory of a rank over time, as the steps of a curve; charts and traces draw the same one."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.ir.live import left_bytes, live_bytes, one_each
from penstock.ir.timeline import Timeline

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class MemoryCurve:
    """The steps of a rank's memory: from `time_s[n]` on, `alive[n]` activations or bytes are there."""

    time_s: NDArray[np.float64]
    alive: Ints


def memory_levels(timeline: Timeline, *, in_bytes: bool | None = None) -> tuple[Ints, Ints]:
    """Return, per row, what its rank holds while the row runs, and from its end until the next computation starts.

    Both are meaningful for computations only. They are bytes or numbers of activations, by default bytes if known.
    """
    program, sizes = timeline.program, timeline.sizes
    in_bytes = knows_bytes(timeline) if in_bytes is None else in_bytes
    unit = sizes if in_bytes and sizes is not None else one_each(program)
    levels_during, levels_after_row = live_bytes(program, unit), left_bytes(program, unit)
    levels_after = np.zeros_like(levels_during)
    for rank in range(timeline.num_ranks):
        rows = timeline.compute_rows(rank)
        # Messages that leave and receives that are posted between two computations do so at once.
        levels_after[rows[:-1]] = levels_after_row[rows[1:] - 1]
    # The two computations of an overlapped pair end together, so the level after both is that of the second.
    first = np.flatnonzero(program.joined)
    levels_after[first] = levels_after[first + 1]
    return levels_during, levels_after


def knows_bytes(timeline: Timeline) -> bool:
    """Whether a timeline says how large activations are."""
    return timeline.sizes is not None and bool(timeline.sizes.activation.any())


def memory_curves(timeline: Timeline, *, in_bytes: bool | None = None) -> list[MemoryCurve]:
    """Return the curve of each rank, in bytes or in numbers of activations, by default in bytes if known."""
    levels_during, levels_after = memory_levels(timeline, in_bytes=in_bytes)
    return [_curve(timeline, rank, levels_during, levels_after) for rank in range(timeline.num_ranks)]


def _curve(timeline: Timeline, rank: int, levels_during: Ints, levels_after: Ints) -> MemoryCurve:
    """Return two steps per computation: what is alive while it runs, and what it leaves behind."""
    rows = timeline.compute_rows(rank)
    if not len(rows):
        return MemoryCurve(np.zeros(1), np.zeros(1, np.int64))
    time_s = np.column_stack([timeline.start_s[rows], timeline.end_s[rows]])
    alive = np.column_stack([levels_during[rows], levels_after[rows]])
    # Of a pair that starts and ends together, the first has no end and the second no start of its own.
    joined = timeline.program.joined[rows]
    is_step = np.column_stack([~np.append(False, joined[:-1]), ~joined])
    # Measured ends may pass the next start by a clock tick.
    return MemoryCurve(np.maximum.accumulate(time_s[is_step]), alive[is_step].astype(np.int64))


def without_spikes(curve: MemoryCurve) -> MemoryCurve:
    """Return the curve with one step per time, the last: what is freed and taken at once shows as nothing."""
    is_last = np.append(curve.time_s[1:] > curve.time_s[:-1], True)
    return MemoryCurve(curve.time_s[is_last], curve.alive[is_last])


def largest_within(curve: MemoryCurve, edges_s: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return [num_columns] the most that is alive at any time within each column of time."""
    # A column begins at a level, and has steps inside it.
    level = np.append(0, curve.alive)
    first = np.searchsorted(curve.time_s, edges_s[:-1], side="right")
    last = np.searchsorted(curve.time_s, edges_s[1:], side="left")
    bounds = np.column_stack([first, np.maximum(last, first) + 1]).ravel()
    return np.asarray(np.maximum.reduceat(np.append(level, 0), bounds)[::2], np.int64)
