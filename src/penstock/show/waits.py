"""What every computation waited for: the block on another rank whose message came last, and when it came.

    rank 0   [0F0]            producer of 1F0 is 0F0
    rank 1        >>[1F0]     its message arrives where 1F0 may start

A block does not wait for what is earlier on its own rank: that rank was busy.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.ir.awaits import receive_of_row
from penstock.ir.deps import NONE, predecessors
from penstock.ir.timeline import Timeline


@dataclass(frozen=True, slots=True, eq=False)
class Waits:
    """One entry per row of the program; meaningful for computations only."""

    producer: NDArray[np.int64]
    """The row that made the last message that this one needs; `NONE` where it needs none."""
    arrival_s: NDArray[np.float64]
    """When that message was there; 0 where there is none."""


def waits_of(timeline: Timeline) -> Waits:
    """Find what the computations of a timeline waited for; of an overlapped pair, both for the later message."""
    program = timeline.program
    source = predecessors(program)[:, 0]
    received = receive_of_row(program, source)
    needs = np.flatnonzero(received != NONE)
    producer = np.full(program.num_instructions, NONE, np.int64)
    arrival_s = np.zeros(program.num_instructions)
    receives = received[needs]
    arrival_s[needs] = timeline.end_s[receives]
    producer[needs] = source[source[receives]]
    first = np.flatnonzero(program.joined)
    later = np.where(arrival_s[first] >= arrival_s[first + 1], first, first + 1)
    for half in (first, first + 1):
        producer[half], arrival_s[half] = producer[later], arrival_s[later]
    return Waits(producer, arrival_s)
