"""The same order with every backward in two parts: what a split costs is measured so, whatever the schedule.

0F0 0F1 0B0 0B1  ->  0F0 0F1 0I0 0W0 0I1 0W1
"""

from dataclasses import replace

import numpy as np

from penstock.ir.operations import Kind
from penstock.ir.schedule import Schedule


def with_split_backwards(schedule: Schedule) -> Schedule:
    """Return the schedule with the weight part of every whole backward right behind its input part.

    Of two actions that overlap, the weight part follows both.
    """
    wholes = np.flatnonzero(schedule.kind == Kind.BACKWARD)
    places = wholes + 1 + schedule.joined[wholes]
    kind = schedule.kind.copy()
    kind[wholes] = Kind.BACKWARD_INPUT
    more = np.bincount(schedule.rank_of_row[wholes], minlength=schedule.num_ranks)
    return replace(
        schedule,
        name=f"{schedule.name} (backwards split)",
        op=np.insert(kind, places, Kind.BACKWARD_WEIGHT),
        stage=np.insert(schedule.stage, places, schedule.stage[wholes]),
        microbatch=np.insert(schedule.microbatch, places, schedule.microbatch[wholes]),
        slice=np.insert(schedule.slice, places, schedule.slice[wholes]),
        joined=np.insert(schedule.joined, places, False),
        offsets=schedule.offsets + np.concatenate([[0], np.cumsum(more)]),
    )
