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

NO_MESSAGE, SEND, RECEIVE = range(3)
ROLES = IS_MESSAGE.astype(np.int8) + IS_RECEIVE
"""[NUM_OPS] NO_MESSAGE, SEND or RECEIVE, by operation."""


def post_receives_ahead(program: Program) -> Program:
    """Move receives toward the front of their rank."""
    return program.reordered(_orders(program))


def _orders(program: Program) -> Iterator[NDArray[np.intp]]:
    """Yield for each rank the order in which its rows are to run; a rank's columns stay in a processor's cache."""
    rank_of_stage = np.array(program.placement.rank_of_stage, np.int32)
    consumers = Consumers(program)
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
            consumers.places(part, place), place, np.zeros(program.num_ranks, np.int32),
        )  # fmt: skip
        # Messages come before the computation of their place. The sort is stable, so equal keys keep their order.
        yield np.argsort(2 * place + is_compute, kind="stable")


class Consumers:
    """Finds the computation that consumes a message, through one cell for each message."""

    def __init__(self, program: Program) -> None:
        self.program = program
        num_cells = num_identities(program) + 1
        self.no_cell = len(MESSAGES) * num_cells  # the cell of all rows that neither consume nor receive a message
        self.first_consumed = np.where(TAKEN >= 0, TAKEN.astype(np.int64) * num_cells, self.no_cell)
        self.first_received = np.where(IS_RECEIVE, MOVED.astype(np.int64) * num_cells, self.no_cell)
        self.place_of_cell = np.zeros(self.no_cell + 1, np.int32)

    def places(self, part: slice, place: NDArray[np.int32]) -> NDArray[np.int32]:
        """[num_rows] for each receive of a rank the place of the computation that consumes its message, 0 without one.

        The values of other rows mean nothing.
        """
        op, identity = self.program.op[part], identities_of(self.program, part)
        self.place_of_cell[np.minimum(identity + self.first_consumed.take(op), self.no_cell)] = place
        return self.place_of_cell.take(identity + self.first_received.take(op), mode="clip")


def _move_receives(
    op: Any, roles: Any, peer: Any, rank_of_stage: Any, place_of_consumer: Any, place: Any, last_place: Any
) -> None:
    """Give each receive of a rank its earliest place; `last_place[peer_rank]` is that of the pair's last message."""
    for row in range(len(op)):
        role = roles[op[row]]
        if role == NO_MESSAGE:
            continue
        peer_rank = rank_of_stage[peer[row]]
        if role == RECEIVE:
            # One computation ahead, but not past another message of the pair, and never later than it was.
            place[row] = max(min(place[row], place_of_consumer[row] - 1), last_place[peer_rank])
        last_place[peer_rank] = place[row]


_MOVE = Hot(_move_receives)
