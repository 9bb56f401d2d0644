"""Collectives: reductions hold their rank up, as they do when they run; gathers run beside its computations.

    rank 0     UNSHARD  .  .  F0  B0  REDUCE_GRAD  F1 ...  REDUCE_TIED  STEP      F0 waits for the gather
    its queue  [ gather    ]

A tied reduction is a barrier: each member waits in it until all have come to it. Its queue has one row of no length for
each, the arrival, and is over when all have arrived.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.ir.awaits import gather_of_row
from penstock.ir.deps import NONE
from penstock.ir.operations import Op
from penstock.ir.program import Program
from penstock.simulation.costs.costs import Costs
from penstock.simulation.queues import Queues, Rows

NOWHERE: Rows = np.empty(0, np.int64)


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
    if Op.REDUCE_TIED not in program.ops:
        return Barriers(NOWHERE, NOWHERE)
    rows = np.flatnonzero(program.op == Op.REDUCE_TIED)
    arrivals = np.where(np.isin(rows, program.offsets), NONE, rows - 1)
    groups = program.peer[rows]
    in_order = np.argsort(groups, kind="stable")
    _, index, lengths = np.unique(groups, return_inverse=True, return_counts=True)
    arrived = queues.add(lengths, after=arrivals[in_order], duration_s=np.zeros(len(rows)))
    before[rows] = arrived[np.cumsum(lengths)[index] - 1]
    return Barriers(rows, arrivals)


def add_gathers(program: Program, costs: Costs, queues: Queues) -> list[NDArray[np.int32]]:
    """Put gathers on a queue per rank, in the order in which the rank launches them.

    Return the column of what computations wait for, rows of these queues; none where gathers are free.
    """
    seconds = costs.per_stage("unshard_s", program.num_stages)
    if Op.UNSHARD not in program.ops or not seconds.any():
        return []
    launches = np.flatnonzero(program.op == Op.UNSHARD)
    lengths = np.bincount(program.rank_of_row[launches], minlength=program.num_ranks)
    runs = queues.add(lengths, after=launches, duration_s=seconds[program.stage[launches]])
    queues.outlasting.append((launches, runs))
    run_of_row = np.full(program.num_instructions + 1, NONE, np.int32)  # the last one is that of `NONE`
    run_of_row[launches] = runs
    return [run_of_row[gather_of_row(program)]]
