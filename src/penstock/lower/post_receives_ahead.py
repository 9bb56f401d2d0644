"""Pass: post each receive one computation ahead of its consumer, so that the transfer runs under that computation.

    Before: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    After:  0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1

A receive only moves toward the front, and never past another send or receive of the same pair of ranks: that order is
what makes a single queue per pair free of deadlock. One computation ahead bounds the memory of messages.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.deps import predecessors
from penstock.ir.hot import Hot
from penstock.ir.instruction import Op
from penstock.ir.program import Program


def post_receives_ahead(program: Program) -> Program:
    """Move receives toward the front of their rank."""
    is_compute = program.is_compute
    starts_group = is_compute.copy()
    starts_group[1:] &= ~program.joined[:-1]
    # A computation's place is its number, two joined ones counted as one; a message's place that of the next
    # computation.
    place: NDArray[np.int64] = np.cumsum(starts_group) - is_compute
    data_from = predecessors(program)[:, 0]
    consumers = np.flatnonzero(is_compute & (data_from >= 0))
    consumer_place = np.zeros(program.num_instructions, np.int64)
    consumer_place[data_from[consumers]] = place[consumers]
    is_receive = np.isin(program.op, (Op.RECEIVE_FORWARD, Op.RECEIVE_BACKWARD))
    is_message = is_receive | np.isin(program.op, (Op.SEND_FORWARD, Op.SEND_BACKWARD))
    peer_rank = np.array(program.placement.rank_of_stage, np.int32)[np.where(is_message, program.peer, 0)]
    _MOVE(
        program.num_instructions, program.offsets, is_message, is_receive, peer_rank, consumer_place, place,
        np.zeros(program.num_ranks, np.int64),
    )  # fmt: skip
    # Messages stand before the computation of their place; equal keys keep their order.
    return program.reordered(np.argsort(2 * place + is_compute, kind="stable"))


def _move_receives(
    offsets: Any, is_message: Any, is_receive: Any, peer_rank: Any, consumer_place: Any, place: Any, last_place: Any
) -> None:
    """Give each receive its earliest allowed place; `last_place[peer]` is where the pair's last message stands."""
    for rank in range(len(offsets) - 1):
        begin, end = offsets[rank], offsets[rank + 1]
        for peer in range(len(last_place)):
            last_place[peer] = place[begin] if begin < end else 0
        for row in range(begin, end):
            if not is_message[row]:
                continue
            peer = peer_rank[row]
            if is_receive[row]:
                place[row] = max(min(place[row], consumer_place[row] - 1), last_place[peer])
            last_place[peer] = place[row]


_MOVE = Hot(_move_receives)
