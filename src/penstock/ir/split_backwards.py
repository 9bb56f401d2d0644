"""The same order with every backward in two parts: what a split costs is measured so, whatever the schedule.

0F0 0F1 0B0 0B1  ->  0F0 0F1 0I0 0W0 0I1 0W1
"""

from dataclasses import replace

import numpy as np

from penstock.ir.operations import Kind
from penstock.ir.schedule import Schedule


def with_split_backwards(schedule: Schedule) -> Schedule:
    """Return the schedule with every whole backward as an input gradient, and a weight gradient right after it.

    The weight gradient of an action in an overlapped pair follows the pair.
    """
    wholes = np.flatnonzero(schedule.kind == Kind.BACKWARD)
    op = schedule.op.copy()
    op[wholes] = Kind.BACKWARD_INPUT
    places = wholes + 1 + schedule.joined[wholes]
    name = f"{schedule.name} (backwards split)"
    return replace(schedule, op=op).with_inserted(Kind.BACKWARD_WEIGHT, wholes, places, name=name)
