"""Pass: post each receive one computation ahead of its consumer, so that the transfer runs under that computation.

    Before: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    After:  0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1

A receive only moves toward the front, and never past another send or receive of the same pair of ranks: that order is
what keeps the queues of `pair_fifo` free of deadlock. Under `coalesced` this pass does not run: a receive that moves to
an earlier group holds up the other messages of that group.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.deps import identities_of, num_identities
from penstock.ir.hot import Hot
from penstock.ir.operations import IS_COMPUTE, IS_MESSAGE, IS_RECEIVE, MESSAGES, MOVED, TAKEN
from penstock.ir.program import Program

OTHER, SEND, RECEIVE = range(3)
ROLES = IS_MESSAGE.astype(np.int8) + IS_RECEIVE
"""[NUM_OPS] one of these three."""


def post_receives_ahead(program: Program) -> Program:
    """Move receives toward the front of their rank."""
    return program.reordered(_orders(program))


def _orders(program: Program) -> Iterator[NDArray[np.intp]]:
    """For each rank, the order in which its rows are to run; a rank's columns stay in a processor's cache."""
    rank_of_stage = np.array(program.placement.rank_of_stage, np.int32)
    takers = _Takers(program)
    for begin, end in pairwise(program.offsets.tolist()):
        part = slice(begin, end)
        is_compute = IS_COMPUTE.take(program.op[part])
        starts_group = is_compute.copy()
        starts_group[1:] &= ~program.joined[begin : end - 1]
        # The place of a computation is its number, an overlapped pair counted once. The place of a message is that of
        # the next computation.
        place = np.cumsum(starts_group, dtype=np.int32)
        place -= is_compute
        _MOVE(
            program.num_instructions, program.op[part], ROLES, program.peer[part], rank_of_stage,
            takers.places(part, place), place, np.zeros(program.num_ranks, np.int32),
        )  # fmt: skip
        # Messages come before the computation of their place. The sort is stable, so equal keys keep their order.
        yield np.argsort(2 * place + is_compute, kind="stable")


class _Takers:
    """Finds the computation that takes a message."""

    def __init__(self, program: Program) -> None:
        self.program = program
        num_cells = num_identities(program) + 1
        self.last = len(MESSAGES) * num_cells  # a cell for all rows that neither take nor receive a message
        self.takes = np.where(TAKEN >= 0, TAKEN.astype(np.int64) * num_cells, self.last)
        self.receives = np.where(IS_RECEIVE, MOVED.astype(np.int64) * num_cells, self.last)
        self.taken_at = np.zeros(self.last + 1, np.int32)

    def places(self, part: slice, place: NDArray[np.int32]) -> NDArray[np.int32]:
        """[num_rows] for each receive of a rank the place of the computation that takes its message, 0 without one.

        The values of other rows mean nothing.
        """
        op, cell = self.program.op[part], identities_of(self.program, part)
        self.taken_at[np.minimum(cell + self.takes.take(op), self.last)] = place
        return self.taken_at.take(cell + self.receives.take(op), mode="clip")


def _move_receives(
    op: Any, roles: Any, peer: Any, rank_of_stage: Any, place_of_consumer: Any, place: Any, last_place: Any
) -> None:
    """Give each receive of a rank its earliest place; `last_place[other]` is that of the last message of a pair."""
    for row in range(len(op)):
        code = op[row]
        if roles[code] == OTHER:
            continue
        other = rank_of_stage[peer[row]]
        if roles[code] == RECEIVE:
            # One computation ahead, but not past another message of the pair, and never later than it was.
            place[row] = max(min(place[row], place_of_consumer[row] - 1), last_place[other])
        last_place[other] = place[row]


_MOVE = Hot(_move_receives)
