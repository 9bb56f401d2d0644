"""Where the waits for streamed data are between the computations of a timeline.

    rank 0   [F0]|data of 1|~~~~[B0] ... [F1]        ~ a message that was waited for after the data

A rank pulls the next microbatch when it is about to wait anyway, so data may cost no time at all: what they cost is
the part of their wait in which everything else was there.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.ir.timeline import DataWait, Timeline


def waits_of_ranks(timeline: Timeline) -> list[list[DataWait]]:
    """Return each rank's waits, in their order."""
    found: list[list[DataWait]] = [[] for _ in range(timeline.num_ranks)]
    for wait in timeline.data_waits:
        found[wait.rank].append(wait)
    return found


def data_ready_s(timeline: Timeline, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """[len(rows)] the end of the last data wait on the row's rank before the row started; -inf without one."""
    found = np.full(len(rows), -np.inf)
    ranks = timeline.program.rank_of_row[rows]
    for rank, waits in enumerate(waits_of_ranks(timeline)):
        ends_s = np.array([-np.inf, *(wait.end_s for wait in waits)])
        own = np.flatnonzero(ranks == rank)
        found[own] = ends_s[np.searchsorted(ends_s, timeline.start_s[rows[own]], side="right") - 1]
    return found
