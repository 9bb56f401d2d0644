"""The same order with every backward in two parts: what a split costs is measured so, whatever the schedule.

0F0 0F1 0B0 0B1  ->  0F0 0F1 0I0 0W0 0I1 0W1
"""

import numpy as np

from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule


def with_split_backwards(schedule: Schedule) -> Schedule:
    """Return the schedule with the weight part of every whole backward right behind its input part.

    Of two actions that overlap, the weight part follows both.
    """
    wholes = np.flatnonzero(schedule.kind == Kind.BACKWARD)
    places = wholes + 1 + schedule.joined[wholes]
    kind = schedule.kind.copy()
    kind[wholes] = Kind.BACKWARD_INPUT
    rank_of_whole = np.searchsorted(schedule.offsets, wholes, side="right") - 1
    more = np.bincount(rank_of_whole, minlength=schedule.num_ranks)
    return Schedule(
        f"{schedule.name} (backwards split)",
        schedule.placement,
        schedule.num_microbatches,
        schedule.num_slices,
        schedule.route_of_microbatch,
        np.insert(kind, places, Kind.BACKWARD_WEIGHT),
        np.insert(schedule.stage, places, schedule.stage[wholes]),
        np.insert(schedule.microbatch, places, schedule.microbatch[wholes]),
        np.insert(schedule.slice, places, schedule.slice[wholes]),
        np.insert(schedule.joined, places, False),
        schedule.offsets + np.concatenate([[0], np.cumsum(more)]),
    )
