"""Which sent messages must have arrived, told by the messages that come back; so sent tensors need not live all step.

    rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 ...      when the gradient of microbatch 0 is here,
    rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 ...                   rank 1 has run 1F0, so message 0SEND_F0 has arrived

A peer that sends a message has run everything before it in its program, so what that consumed has arrived. Waiting for
such a send takes no time, and computation never waits for any other. Where nothing comes back for long, as in the
forwards of GPipe, the peer's position says the same: what it has used has arrived.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.ir.deps import NONE
from penstock.ir.instruction import Op
from penstock.ir.program import Program


def arrived_before(program: Program, before: NDArray[np.int32], rank: int) -> dict[int, tuple[int, int]]:
    """Per receive row of a rank: its peer, and how many of the rank's sends to that peer have arrived once it is here.

    `before` are the program's predecessors.
    """
    mine = np.flatnonzero(program.rank_of_row == rank)
    receives = mine[np.isin(program.op[mine], (Op.RECEIVE_FORWARD, Op.RECEIVE_BACKWARD))]
    rank_of_stage = np.array(program.placement.rank_of_stage)
    used = _used(program, before, rank)
    nothing: NDArray[np.int64] = np.empty(0, np.int64)
    return {
        int(row): (peer, int(np.searchsorted(used.get(peer, nothing), before[row, 0])))
        for row, peer in zip(receives, rank_of_stage[program.peer[receives]].tolist(), strict=True)
    }


def sends_by_producer(program: Program, before: NDArray[np.int32]) -> list[int]:
    """Per row, the send that carries its result away, or NONE."""
    feeds = np.full(program.num_instructions, NONE, np.int64)
    sends = np.flatnonzero(np.isin(program.op, (Op.SEND_FORWARD, Op.SEND_BACKWARD)))
    feeds[before[sends, 0]] = sends
    found: list[int] = feeds.tolist()
    return found


def used_at(program: Program, before: NDArray[np.int32], rank: int) -> dict[int, list[int]]:
    """Per peer, for each send of a rank to it: the peer's row, from 0, after which the message has arrived."""
    return {peer: (rows - program.offsets[peer]).tolist() for peer, rows in _used(program, before, rank).items()}


def _used(program: Program, before: NDArray[np.int32], rank: int) -> dict[int, NDArray[np.int64]]:
    """Per peer, for each send of a rank to it, the row after which it and all sends before it have been used."""
    consumer = _consumers(program, before)
    mine = np.flatnonzero(program.rank_of_row == rank)
    sends = mine[np.isin(program.op[mine], (Op.SEND_FORWARD, Op.SEND_BACKWARD))]
    peer_of_send = np.array(program.placement.rank_of_stage)[program.peer[sends]]
    # On a channel messages arrive in order: a message has, once those before it are used too.
    return {peer: np.maximum.accumulate(consumer[sends[peer_of_send == peer]]) for peer in set(peer_of_send.tolist())}


def _consumers(program: Program, before: NDArray[np.int32]) -> NDArray[np.int64]:
    """[num_rows] per send, the row that computes with its message."""
    is_receive = np.isin(program.op, (Op.RECEIVE_FORWARD, Op.RECEIVE_BACKWARD))
    receives = np.flatnonzero(is_receive)
    computes = np.flatnonzero(program.is_compute & (before[:, 0] != NONE))
    computes = computes[is_receive[before[computes, 0]]]
    reader = np.full(program.num_instructions, program.num_instructions, np.int64)
    reader[before[computes, 0]] = computes
    consumer = np.full(program.num_instructions, program.num_instructions, np.int64)
    consumer[before[receives, 0]] = reader[receives]
    return consumer
