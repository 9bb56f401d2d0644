"""What the idle time before every block is put down to, as columns for the page; in the words of `penstock doctor`.

A lane of n blocks has n + 1 gaps: one before each block, and one after the last.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.ir.timeline import Timeline
from penstock.simulation.causes import Cause, IdleSpan, idle_spans
from penstock.simulation.costs.costs import Costs
from penstock.simulation.costs.fit import costs_from_timeline
from penstock.simulation.message_latency import with_true_arrivals

NAME_OF_CAUSE = {
    Cause.DEPENDENCY: "dependency",
    Cause.TRANSFER: "transfer",
    Cause.IMBALANCE: "imbalance",
    Cause.STRAGGLER: "straggler",
    Cause.LAUNCH: "launch",
    Cause.SYNCHRONISATION: "synchronisation",
    Cause.MEMORY: "memory limit",
    Cause.DATA: "data loading",
}


@dataclass(frozen=True, slots=True, eq=False)
class IdleGaps:
    """Of one rank: one entry per gap and cause, gap by gap."""

    gap: NDArray[np.int64]
    """The number of blocks before it."""
    cause: NDArray[np.int64]
    duration_s: NDArray[np.float64]


def idle_gaps(timeline: Timeline, costs: Costs | None = None) -> list[IdleGaps]:
    """Find the causes of every rank's idle time.

    `costs` are what the timeline was predicted with; without them, its own typical durations are taken, as for a
    measured one.
    """
    if timeline.source == "measured":
        timeline = with_true_arrivals(timeline)
    spans = idle_spans(timeline, costs or costs_from_timeline(timeline))
    starts = [timeline.start_s[timeline.compute_rows(rank)] for rank in range(timeline.num_ranks)]
    return [_gaps_of_rank(of_rank, start_s) for of_rank, start_s in zip(spans, starts, strict=True)]


def _gaps_of_rank(spans: Sequence[IdleSpan], start_s: NDArray[np.float64]) -> IdleGaps:
    begin_s, end_s, cause = np.array(spans, np.float64).reshape(-1, 3).T
    # A span ends where a block starts, or before; rounding cannot put its middle on the wrong side.
    gap = np.searchsorted(start_s, (begin_s + end_s) / 2)
    found, place = np.unique(gap * len(Cause) + cause.astype(np.int64), return_inverse=True)
    duration_s = np.zeros(len(found))
    np.add.at(duration_s, place, end_s - begin_s)
    return IdleGaps(found // len(Cause), found % len(Cause), duration_s)
