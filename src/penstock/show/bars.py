"""Thin bars at the foot of a lane, beside the computations: collectives, copies and optimizer steps.

lane of rank 1   [2F0][2B0].......      a reduction may run beside a computation, so it has a strip of its own,
                      ====    ##        over the blocks; an optimizer step comes when all of them are done
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.ir.collectives import UPDATES_WEIGHTS
from penstock.ir.operations import OPERATIONS, Lane, Op
from penstock.ir.timeline import Timeline
from penstock.show.palette import COLLECTIVE_COLOUR, COPY_COLOUR

Floats = NDArray[np.float64]
COLLECTIVE, OPTIMIZER_STEP, COPY = range(3)
NAMES = ("collective", "optimizer step", "copy")
"""The names of the sorts of bars in a legend, by sort."""
COLOURS = {COLLECTIVE: COLLECTIVE_COLOUR, COPY: COPY_COLOUR}
"""The colours of bars, by sort; optimizer steps are drawn in the ink of the theme."""
FOOT = 0.17
"""The height of a bar, as a share of the lane's."""
_SORT_OF_LANE = {Lane.COLLECTIVE: COLLECTIVE, Lane.COPY: COPY}
_SORT_OF_OP = np.array([_SORT_OF_LANE.get(OPERATIONS[op].lane, -1) for op in Op])
"""The sort of each operation's bars; -1 for an operation that is no bar."""
_SORT_OF_OP[UPDATES_WEIGHTS] = OPTIMIZER_STEP


@dataclass(frozen=True, slots=True, eq=False)
class Bars:
    """The bars of one rank in the order of their starts; one entry of each column per bar."""

    row: NDArray[np.int64]
    """The bar's row of the program."""
    start_s: Floats
    end_s: Floats
    sort: NDArray[np.int64]


def bars_of_rank(timeline: Timeline, rank: int) -> Bars:
    """Lay out the collectives, copies and optimizer steps of one rank that take time."""
    program = timeline.program
    begin, end = int(program.offsets[rank]), int(program.offsets[rank + 1])
    sorts = _SORT_OF_OP[program.op[begin:end]]
    rows = begin + np.flatnonzero((sorts >= 0) & (timeline.end_s[begin:end] > timeline.start_s[begin:end]))
    rows = rows[np.argsort(timeline.start_s[rows], kind="stable")]
    return Bars(rows, timeline.start_s[rows], timeline.end_s[rows], sorts[rows - begin])


def sorts_used(timelines: Sequence[Timeline], *, longer_than_s: float = 0.0) -> list[int]:
    """Return the sorts of bars in timelines, in order, of which a bar is longer than `longer_than_s`."""
    bars = [bars_of_rank(timeline, rank) for timeline in timelines for rank in range(timeline.num_ranks)]
    long_sorts = [rank_bars.sort[rank_bars.end_s - rank_bars.start_s > longer_than_s] for rank_bars in bars]
    return [int(sort) for sort in np.unique(np.concatenate([np.zeros(0, np.int64), *long_sorts]))]


def window_s(timeline: Timeline) -> tuple[float, float]:
    """Return the first start and the last end of all computations, between which a rank without one is idle."""
    rows = timeline.program.is_compute
    if not rows.any():
        return 0.0, 0.0
    return float(timeline.start_s[rows].min()), float(timeline.end_s[rows].max())


def last_end_s(timeline: Timeline) -> float:
    """Return the last end of all computations and bars."""
    bar_ends_s = [float(bars_of_rank(timeline, rank).end_s.max(initial=0.0)) for rank in range(timeline.num_ranks)]
    return max(window_s(timeline)[1], *bar_ends_s)


def merged(start_s: Floats, end_s: Floats, gap_s: float) -> tuple[Floats, Floats]:
    """Join intervals that overlap or are at most `gap_s` apart; return the starts and the ends of the joined ones."""
    order = np.argsort(start_s, kind="stable")
    # A joined interval begins where a start lies beyond all ends before it, and ends at the largest of them.
    start_s, reach_s = start_s[order], np.maximum.accumulate(end_s[order])
    firsts = np.flatnonzero(np.append(True, start_s[1:] > reach_s[:-1] + gap_s)[: len(start_s)])
    lasts = np.append(firsts[1:], len(start_s))[: len(firsts)] - 1
    return start_s[firsts], reach_s[lasts]
