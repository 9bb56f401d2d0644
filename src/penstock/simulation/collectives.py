"""Collectives: reductions hold their rank up, as they do when they run; gathers and copies run beside its computations.

    rank 0     UNSHARD  .  .  F0  B0  REDUCE_GRAD  F1 ...  REDUCE_TIED  STEP      F0 waits for the gather
    its queue  [ gather    ]

A tied reduction is a barrier: each member waits in it until all have come to it. Its queue has one row of no length for
each, the arrival, and is over when all have arrived.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.ir.awaits import launched_before
from penstock.ir.deps import NONE
from penstock.ir.operations import NUM_OPS, OPERATIONS
from penstock.ir.program import Program
from penstock.simulation.costs.costs import Costs
from penstock.simulation.durations import BESIDE, IS_TIED, seconds_beside
from penstock.simulation.queues import Queues, Rows

NOWHERE: Rows = np.empty(0, np.int64)
_LANES = [
    np.isin(np.arange(NUM_OPS), [op for op in BESIDE if OPERATIONS[op].lane is lane])
    for lane in dict.fromkeys(OPERATIONS[op].lane for op in BESIDE)
]
"""The operations of each lane that runs beside the computations."""


@dataclass(frozen=True, slots=True, eq=False)
class Barriers:
    """The tied reductions, and the rows after which their ranks come to them; `NONE` where these come at once."""

    rows: Rows
    arrivals: Rows

    def start_s(self, end_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """When the ranks come to them; the walk lets them start when all have come."""
        return np.where(self.arrivals == NONE, 0.0, end_s[self.arrivals])


def add_barriers(program: Program, before: NDArray[np.int32], queues: Queues) -> Barriers:
    """Let each tied reduction wait, in `before`, until all members of its group have come to theirs."""
    rows = program.rows_of(IS_TIED)
    if not len(rows):
        return Barriers(NOWHERE, NOWHERE)
    arrivals = np.where(np.isin(rows, program.offsets), NONE, rows - 1)
    groups = program.peer[rows]
    in_order = np.argsort(groups, kind="stable")
    _, index, lengths = np.unique(groups, return_inverse=True, return_counts=True)
    arrived = queues.add(lengths, after=arrivals[in_order], duration_s=np.zeros(len(rows)))
    before[rows] = arrived[np.cumsum(lengths)[index] - 1]
    return Barriers(rows, arrivals)


def add_launched(program: Program, costs: Costs, queues: Queues) -> list[NDArray[np.int32]]:
    """Put what runs beside the computations, such as gathers, on a queue per rank and lane, in the order of launches.

    Return columns of what computations wait for, rows of these queues; none where all of it is free.
    """
    seconds = seconds_beside(program, costs)
    run_of_row = np.full(program.num_instructions + 1, NONE, np.int32)  # the last one is that of `NONE`
    for is_launched in _LANES:
        launches = program.rows_of(is_launched)
        duration_s = seconds[program.op[launches], program.stage[launches]]
        if duration_s.any():
            lengths = np.bincount(program.rank_of_row[launches], minlength=program.num_ranks)
            runs = run_of_row[launches] = queues.add(lengths, after=launches, duration_s=duration_s)
            queues.outlasting.append((launches, runs))
    return [run_of_row[column] for column in launched_before(program)] if (run_of_row != NONE).any() else []
