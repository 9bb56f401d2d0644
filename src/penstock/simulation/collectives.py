"""Collectives: gathers and reductions over replicas run beside the computations of their rank, in one queue.

    rank 0     UNSHARD  .  .  F0  B0  REDUCE_GRAD  UNSHARD  F1 ...  REDUCE_TIED  STEP
    its queue  [ gather    ]          [ reduction ][ gather ]

F0 and F1 wait for their gathers, REDUCE_TIED (or STEP) for the reductions. Copies have a queue of their own. In a tied
reduction, and in a BARRIER, each member waits until all have come to it. Its queue has rows of no length for each
member, the arrivals of its rank and of its last reduction, and is over when all have arrived.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.ir.awaits import launched_before, num_barriers_before
from penstock.ir.collectives import IS_BARRIER
from penstock.ir.deps import NONE
from penstock.ir.operations import NUM_OPS, OPERATIONS
from penstock.ir.program import Program
from penstock.simulation.costs.costs import Costs
from penstock.simulation.durations import BESIDE, IS_TIED, seconds_beside
from penstock.simulation.queues import Queues, Rows

_LANES = [
    np.isin(np.arange(NUM_OPS), [op for op in BESIDE if OPERATIONS[op].lane is lane])
    for lane in dict.fromkeys(OPERATIONS[op].lane for op in BESIDE)
]
"""The operations of each lane that runs beside the computations."""


@dataclass(frozen=True, slots=True, eq=False)
class Barriers:
    """The tied reductions and barriers, and the rows after which their ranks arrive at them."""

    rows: Rows
    arrivals: NDArray[np.int64]
    """[num_barriers, 1 or 2] the row before on the rank, and the row of a queue that runs the rank's last reduction
    over replicas, if any does; `NONE` where the rank waits for none."""

    def start_s(self, end_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """[num_barriers] when each rank arrives; the walk, instead, lets the members start when all have arrived."""
        return np.asarray(np.where(self.arrivals == NONE, 0.0, end_s[self.arrivals]).max(axis=1, initial=0.0))


def add_barriers(
    program: Program, predecessor: NDArray[np.int32], launched: Sequence[NDArray[np.int32]], queues: Queues
) -> Barriers:
    """Let each tied reduction wait until all ranks of its group have come to theirs, and each BARRIER for all ranks.

    A tied reduction sums the gradients of one parameter that several ranks hold copies of. `predecessor`
    [num_instructions] is a row that each row waits for; that of each tied reduction and barrier is set here. `launched`
    are the columns that `add_launched` returns: rows of collectives that each row waits for, the first column those of
    replicas.
    """
    rows = program.rows_of(IS_TIED | IS_BARRIER)
    # A tied reduction arrives when the row before it on its rank has ended (found without np.isin, which may sort, and
    # then imports numpy.ma, for which the first plan of a process would wait) and when the gradients are summed over
    # the replicas.
    first_row = program.offsets[np.searchsorted(program.offsets, rows, side="right") - 1]
    row_before = np.where(rows == first_row, NONE, rows - 1)
    replica_reductions = [column[rows] for column in launched[:1]]  # the first column is of what replicas exchange
    arrivals = np.column_stack([row_before, *replica_reductions]).astype(np.int64)
    if not len(rows):
        return Barriers(rows, arrivals)
    # Each tied group and each barrier has a queue, with a row for every arrival of a member; when its last row is over,
    # all have come. Barriers are numbered behind the groups.
    number_of_barrier = len(program.tied_groups) + num_barriers_before(program)[rows]
    groups = np.where(IS_BARRIER[program.op[rows]], number_of_barrier, program.peer[rows])
    by_group = np.argsort(groups, kind="stable")
    _, index_of_group, num_members = np.unique(groups, return_inverse=True, return_counts=True)
    after = arrivals[by_group].reshape(-1)
    lengths = num_members * arrivals.shape[1]
    queue_rows = queues.add(lengths, after=after, duration_s=np.zeros(len(after)))
    last_of_queue = queue_rows[np.cumsum(lengths) - 1]
    predecessor[rows] = last_of_queue[index_of_group]
    return Barriers(rows, arrivals)


def add_launched(program: Program, costs: Costs, queues: Queues) -> list[NDArray[np.int32]]:
    """Put what runs beside the computations, such as gathers, on a queue per rank and lane, in the order of launches.

    Return columns like those of `launched_before`, in which a row waits for a row of these queues; no columns where all
    of it is free. An operation that is free on every stage is over where it is launched, and waits for no other.
    """
    seconds = seconds_beside(program, costs)
    is_free = ~seconds.any(axis=1)
    queue_row = np.full(program.num_instructions + 1, NONE, np.int32)  # the last entry is for the index `NONE`
    for is_of_lane in _LANES:
        launches = program.rows_of(is_of_lane & ~is_free)
        if len(launches):
            duration_s = seconds[program.op[launches], program.stage[launches]]
            lengths = np.bincount(program.rank_of_row[launches], minlength=program.num_ranks)
            added_rows = queues.add(lengths, after=launches, duration_s=duration_s)
            queue_row[launches] = added_rows
            queues.ended_by_queues.append((launches, added_rows))
    return [queue_row[column] for column in launched_before(program)] if (queue_row != NONE).any() else []
