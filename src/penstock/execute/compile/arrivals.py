"""Which sent messages have arrived, as the messages that come back show; so sent tensors need not live all step.

    rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 ...      when the gradient of microbatch 0 is here,
    rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 ...                   rank 1 has run 1F0, so message 0SEND_F0 has arrived

A peer that sends a message has run everything before it in its program, so what that consumed has arrived. Waiting for
such a send takes no time, and computation never waits for any other. Where nothing comes back for long, as in the
forwards of GPipe, the peer's position says the same: what it has used has arrived.

`before` holds the predecessors of a program's rows: column 0 of `predecessors`. The program may have the rows of a rank
and of its peers only.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.ir.deps import NONE
from penstock.ir.operations import IS_RECEIVE, IS_SEND
from penstock.ir.program import Program

Rows = NDArray[np.int32]


def arrived_before(program: Program, before: Rows, rank: int) -> dict[int, tuple[int, int]]:
    """Per receive of a rank: its peer, and how many of the rank's sends to that peer have arrived once it is here."""
    first, end = program.offsets[rank : rank + 2].tolist()
    receives = first + np.flatnonzero(IS_RECEIVE[program.op[first:end]])
    peers = np.array(program.placement.rank_of_stage)[program.peer[receives]]
    used = _used(program, before, rank)
    counts = np.zeros(len(receives), np.int64)
    for peer, rows in used.items():
        counts[peers == peer] = np.searchsorted(rows, before[receives[peers == peer]])
    return dict(zip(receives.tolist(), zip(peers.tolist(), counts.tolist(), strict=True), strict=True))


def used_after(program: Program, before: Rows, rank: int) -> dict[int, list[int]]:
    """Per peer, for each send of a rank to it: the peer's row, from 0, after which the message has arrived."""
    return {peer: (rows - program.offsets[peer]).tolist() for peer, rows in _used(program, before, rank).items()}


def _used(program: Program, before: Rows, rank: int) -> dict[int, NDArray[np.int64]]:
    """Per peer, for each send of a rank to it, the row after which it and all sends before it have been used."""
    first, end = program.offsets[rank : rank + 2].tolist()
    sends = first + np.flatnonzero(IS_SEND[program.op[first:end]])
    consumer = _consumers(program, before)[sends]
    peers = np.array(program.placement.rank_of_stage)[program.peer[sends]]
    # On a channel messages arrive in order: a message has, once those before it are used too.
    return {peer: np.maximum.accumulate(consumer[peers == peer]) for peer in np.unique(peers).tolist()}


def _consumers(program: Program, before: Rows) -> NDArray[np.int64]:
    """[num_rows] per send, the row that computes with its message; the number of rows where none does."""
    is_receive = IS_RECEIVE[program.op]
    computes = np.flatnonzero(program.is_compute & (before != NONE))
    computes = computes[is_receive[before[computes]]]
    reader = np.full(program.num_rows, program.num_rows, np.int64)
    reader[before[computes]] = computes
    receives = np.flatnonzero(is_receive & (before != NONE))
    consumer = np.full(program.num_rows, program.num_rows, np.int64)
    consumer[before[receives]] = reader[receives]
    return consumer
