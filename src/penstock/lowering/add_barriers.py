"""Pass: let all ranks wait for each other after every step of an untimed walk.

    Before: 0F0 0SEND_F0 0F1 0SEND_F1 ...
            1RECV_F0 1F0 ...
    After:  0F0 0SEND_F0 0BARRIER 0F1 0SEND_F1 0BARRIER ...
            1RECV_F0     0BARRIER 1F0          0BARRIER ...

A step is what starts between two ends of actions, and the messages that leave by its end: both ends of a message are in
the same step, as in DeepSpeed's engine, whose steps are atomic. So the work between two barriers can be looked at, and
a hang is found in one of them.
"""

from itertools import pairwise

import numpy as np

from penstock.ir.deps import predecessors
from penstock.ir.hot import Int64s
from penstock.ir.linear_extension import Starts, walk_untimed, whole_ends, whole_starts
from penstock.ir.operations import IS_RECEIVE, IS_SEND, Op
from penstock.ir.program import NewRows, Program


def add_barriers(program: Program, start: Starts | None = None) -> Program:
    """Add a BARRIER on every rank for each moment at which an action of any rank ends.

    `program` comes from `add_messages` with `in_groups`, which places both ends of a message where its maker ends.
    `start` are the starts of its actions in an untimed walk, if the caller knows them.
    """
    schedule = program.actions()
    starts = whole_starts(walk_untimed(schedule, predecessors(schedule))) if start is None else start
    end_times = whole_ends(schedule, starts)
    times = _times(program, starts, end_times)
    moments = 2 * np.unique(end_times)
    # On each rank, a barrier comes behind the last row that is due by its moment. `times` ascend along a rank, and what
    # is due by a moment depends on nothing that is due later: so all ranks reach it.
    rows = np.concatenate([
        begin + np.searchsorted(times[begin:end], moments, side="right") - 1
        for begin, end in pairwise(program.offsets.tolist())
    ])  # fmt: skip
    rank = np.repeat(np.arange(program.num_ranks), len(moments))
    is_first = rows < program.offsets[rank]
    key = np.where(is_first, NewRows.before(program.offsets[rank]), NewRows.after(rows))
    stage = np.array([stages[0] for stages in program.placement.stages_of_rank])[rank]
    zeros = np.zeros_like(rank)
    return program.inserted(NewRows(key, rank, np.full_like(rank, Op.BARRIER), stage, zeros, zeros, stage))


def _times(program: Program, starts: Starts, end_times: Int64s) -> Int64s:
    """[num_rows] twice the start of an action plus 1, and twice the end of its maker for a message.

    So a message that leaves at some moment is due before the actions that start then.
    """
    source = predecessors(program)[:, 0]
    sends, receives = program.rows_of(IS_SEND), program.rows_of(IS_RECEIVE)
    end_of_row = np.zeros(program.num_rows, np.int64)
    end_of_row[program.compute_rows()] = end_times
    times = np.zeros(program.num_rows, np.int64)
    times[program.compute_rows()] = 2 * starts.astype(np.int64) + 1
    times[sends] = 2 * end_of_row[source[sends]]
    times[receives] = times[source[receives]]
    return times
