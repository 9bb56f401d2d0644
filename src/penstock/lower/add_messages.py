"""Pass: add a send after each action whose result leaves the rank, and a receive where it is surely in time.

    Before                       After
    0F0 0F1 0B0 0B1              0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    1F0 1B0 1F1 1B1              1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1

Why this cannot deadlock: an untimed walk gives all actions of all ranks one common order, by (start, rank), that keeps
every dependency. Each message has one moment in it, that of the action which makes it. Its receive stands before the
first later action of the receiving rank, hence before its consumer and not after its send. So between two ranks all
sends and receives, of both directions, stand in the common order at both ends, and the earliest open message can always
move: under rendezvous, under any buffer, and in a single queue per pair of ranks.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError
from penstock.ir.deps import NONE, predecessors
from penstock.ir.instruction import Op
from penstock.ir.program import NewRows, Program
from penstock.ir.walk import walk

NOMINAL_DURATION = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0, Op.BACKWARD_INPUT: 1.0, Op.BACKWARD_WEIGHT: 1.0}
"""Only their order of magnitude matters: they decide which of two independent actions counts as earlier."""


@dataclass(frozen=True, slots=True, eq=False)
class _Messages:
    """One entry per message: the row that makes it and both ends."""

    producer: NDArray[np.int64]
    send: Op
    receive: Op
    stage: NDArray[np.int32]
    peer: NDArray[np.int32]


def add_messages(program: Program) -> Program:
    """Add sends and receives to a program of compute instructions.

    Raises:
        ScheduleError: if the order cannot run at all; `penstock.check` says why.
    """
    start = _common_start(program)
    rank_of_row = program.rank_of_row
    additions: list[NewRows] = []
    receives: list[NewRows] = []
    for messages in _find_messages(program, rank_of_row):
        microbatch, slices = program.microbatch[messages.producer], program.slice[messages.producer]
        end_of_group = messages.producer + program.joined[messages.producer]
        receiver = np.array(program.placement.rank_of_stage, np.int32)[messages.peer]
        additions.append(
            NewRows(
                NewRows.after(end_of_group),
                rank_of_row[messages.producer],
                np.full(len(microbatch), messages.send),
                messages.stage,
                microbatch,
                slices,
                messages.peer,
            )
        )
        before = _first_later_row(program, start, messages.producer, receiver)
        receives.append(
            NewRows(
                NewRows.before(before),
                receiver,
                np.full(len(microbatch), messages.receive),
                messages.peer,
                microbatch,
                slices,
                messages.stage,
            )
        )
    moments = np.concatenate([messages.producer for messages in _find_messages(program, rank_of_row)])
    # Messages at one place stand in the common order of the actions that make them, at both ends: sends behind a pair
    # in the order of its members, receives before one row by (start, rank).
    in_order = np.lexsort((moments, start[moments]))
    ends = [_take(_concatenate(rows), in_order) for rows in (additions, receives)]
    return program.inserted(_concatenate(ends))


def _common_start(program: Program) -> NDArray[np.float64]:
    duration = np.array([NOMINAL_DURATION[Op(code)] for code in range(4)])[program.op]
    result = walk(program.offsets, predecessors(program), program.joined, duration)
    if not result.is_complete:
        raise ScheduleError(f"{program.name}: the order cannot run to its end; check the schedule before lowering it")
    return result.start


def _find_messages(program: Program, rank_of_row: NDArray[np.int32]) -> Iterable[_Messages]:
    rank_of_stage = np.array(program.placement.rank_of_stage, np.int32)
    directions = (
        ((Op.FORWARD,), program.placement.next_stage, Op.SEND_FORWARD, Op.RECEIVE_FORWARD),
        ((Op.BACKWARD, Op.BACKWARD_INPUT), program.placement.previous_stage, Op.SEND_BACKWARD, Op.RECEIVE_BACKWARD),
    )
    for producers, neighbours, send, receive in directions:
        rows = np.flatnonzero(np.isin(program.op, producers))
        peer = np.array(neighbours, np.int32)[program.stage[rows]]
        leaves = (peer != NONE) & (rank_of_stage[peer] != rank_of_row[rows])
        yield _Messages(rows[leaves], send, receive, program.stage[rows[leaves]], peer[leaves])


def _first_later_row(
    program: Program, start: NDArray[np.float64], producer: NDArray[np.int64], receiver: NDArray[np.int32]
) -> NDArray[np.int64]:
    """The receiver's first row after the producer in the common order (start, rank)."""
    rank_of_row = program.rank_of_row
    # Starts never fall along a rank, so shifting each rank past the one before makes one sorted column.
    span = start.max(initial=0.0) + 1.0
    moments = start + span * rank_of_row
    wanted = start[producer] + span * receiver
    wins_ties = receiver > rank_of_row[producer]
    found = np.where(
        wins_ties, np.searchsorted(moments, wanted, side="left"), np.searchsorted(moments, wanted, side="right")
    )
    return np.asarray(found, np.int64)


def _concatenate(parts: list[NewRows]) -> NewRows:
    names = ("key", "rank", "op", "stage", "microbatch", "slice", "peer")
    return NewRows(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _take(rows: NewRows, order: NDArray[np.intp]) -> NewRows:
    names = ("key", "rank", "op", "stage", "microbatch", "slice", "peer")
    return NewRows(*(getattr(rows, name)[order] for name in names))
