"""Pass: post each receive one computation ahead of its consumer, so that the transfer runs under that computation.

    Before: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    After:  0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1

A receive only moves toward the front, and never past another send or receive of the same pair of ranks: that order is
what keeps the queues of `pair_fifo` free of deadlock. Under `coalesced` this pass does not run: a receive that moves to
an earlier group holds up the other messages of that group.
"""

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.deps import identities, num_identities
from penstock.ir.hot import Hot, blocks
from penstock.ir.operations import IS_MESSAGE, IS_RECEIVE, MESSAGES, MOVED, TAKEN
from penstock.ir.program import Program

OTHER, SEND, RECEIVE = range(3)
ROLES = IS_MESSAGE.astype(np.int8) + IS_RECEIVE
"""[NUM_OPS] one of these three."""


def post_receives_ahead(program: Program) -> Program:
    """Move receives toward the front of their rank."""
    is_compute = program.is_compute
    starts_group = is_compute.copy()
    starts_group[1:] &= ~program.joined[:-1]
    # The place of a computation is its number, an overlapped pair counted once. The place of a message is that of the
    # next computation.
    place = starts_group.astype(np.int32)  # a sum of booleans into integers takes 30 times as long
    np.cumsum(place, out=place)
    place -= is_compute
    rank_of_stage = np.array(program.placement.rank_of_stage, np.int32)
    _MOVE(
        program.num_instructions, program.offsets, program.op, ROLES, program.peer,
        rank_of_stage,
        _place_of_consumer(program, place), place, np.zeros(program.num_ranks, np.int64),
    )  # fmt: skip
    # Messages come before the computation of their place. The sort is stable, so equal keys keep their order.
    order = place
    order *= 2
    order += is_compute
    for begin, end in pairwise(program.offsets.tolist()):
        order[begin:end] = begin + np.argsort(order[begin:end], kind="stable")
    return program.reordered(order)


def _place_of_consumer(program: Program, place: NDArray[np.int32]) -> NDArray[np.int32]:
    """[num_instructions] for each receive the place of the computation that takes its message, 0 if there is none.

    The values of other rows mean nothing.
    """
    num_cells = num_identities(program) + 1
    last = len(MESSAGES) * num_cells  # a cell for all rows that neither take nor receive a message
    takes = np.where(TAKEN >= 0, TAKEN.astype(np.int64) * num_cells, last)
    receives = np.where(IS_RECEIVE, MOVED.astype(np.int64) * num_cells, last)
    cell = identities(program)
    taken_at = np.zeros(last + 1, np.int32)
    for part in blocks(program.num_instructions):
        taken_at[np.minimum(cell[part] + takes[program.op[part]], last)] = place[part]
    for part in blocks(program.num_instructions):
        cell[part] = taken_at.take(cell[part] + receives[program.op[part]], mode="clip")
    return cell


def _move_receives(
    offsets: Any,
    op: Any,
    roles: Any,
    peer: Any,
    rank_of_stage: Any,
    place_of_consumer: Any,
    place: Any,
    last_place: Any,
) -> None:
    """Give each receive its earliest allowed place; `last_place[other]` is that of the last message of a pair."""
    for rank in range(len(offsets) - 1):
        begin, end = offsets[rank], offsets[rank + 1]
        for row in range(begin, end):
            code = op[row]
            if roles[code] == OTHER:
                continue
            other = rank_of_stage[peer[row]]
            if roles[code] == RECEIVE:
                # `last_place` is never cleared: places grow from rank to rank, so an earlier rank's entry is no limit.
                first = max(last_place[other], place[begin])
                # One computation ahead, but not past another message of the pair, and never later than it was.
                place[row] = max(min(place[row], place_of_consumer[row] - 1), first)
            last_place[other] = place[row]


_MOVE = Hot(_move_receives)
