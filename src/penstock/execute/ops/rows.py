"""`RankRows`: for the rows of one rank, where their data come from and go to, and when sent messages have arrived.

It looks at the columns of this rank and of the ranks that it has messages with, and of no others. Messages that come
back show which sent ones have arrived, so sent tensors need not live all step:

    rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 ...      when the gradient of microbatch 0 is here,
    rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 ...                   rank 1 has run 1F0, so message 0SEND_F0 has arrived

A peer that sends a message has run everything before it in its program, so what that consumed has arrived. Waiting for
such a send takes no time, and computation never waits for any other. Where nothing comes back for long, as in the
forwards of GPipe, the peer's position says the same: what it has used has arrived.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.ir.awaits import receive_of_row
from penstock.ir.deps import NONE, predecessors
from penstock.ir.keeps import keeps
from penstock.ir.operations import IS_MESSAGE, IS_RECEIVE, IS_SEND
from penstock.ir.program import Program

Before = NDArray[np.int32]
"""Column 0 of the predecessors of a program's rows."""


@dataclass(frozen=True, slots=True, eq=False)
class RankRows:
    """The rows of one rank; all rows are numbers in the whole program."""

    rows: range
    source: Mapping[int, int]
    """The row of this rank that a row gets its data from, by row; NONE where there is none."""
    awaits: Mapping[int, int]
    """The receive whose message a row awaits, by row; NONE where there is none."""
    keeps: Mapping[int, int]
    """The `Value` that a row begins to keep for a backward, by row; 0 where it keeps none."""
    arrived: Mapping[int, tuple[int, int]]
    """The peer of a receive, and how many messages to that peer have arrived once the received one is here, by
    receive."""
    used: Mapping[int, list[int]]
    """The peer's rows, from 0, after which the messages to it have arrived, in their order, by peer."""

    @classmethod
    def of(cls, program: Program, rank: int) -> "RankRows":
        """Look at a rank's rows."""
        first, end = program.offsets[rank : rank + 2].tolist()
        nearby = _rows_nearby(program, rank)
        part = program.select(nearby)  # its rows have numbers of their own: `shift` less than in the program
        producers = predecessors(part)[:, 0]
        own_first, own_end = part.offsets[rank : rank + 2].tolist()
        local_producers, shift = producers[own_first:own_end], first - own_first
        awaited = receive_of_row(part, producers)[own_first:own_end]
        is_local = (local_producers >= own_first) & (local_producers < own_end)
        rows = range(first, end)
        return cls(
            rows,
            dict(zip(rows, np.where(is_local, local_producers + shift, NONE).tolist(), strict=True)),
            dict(zip(rows, np.where(awaited == NONE, NONE, awaited + shift).tolist(), strict=True)),
            dict(zip(rows, keeps(program, slice(first, end)).tolist(), strict=True)),
            {row + shift: arrivals for row, arrivals in arrived_before(part, producers, rank).items()},
            used_after(part, producers, rank),
        )


def _rows_nearby(program: Program, rank: int) -> NDArray[np.intp]:
    """Return the rows of a rank and of those that it has messages with, in order."""
    rows = slice(*program.offsets[rank : rank + 2])
    stages = np.unique(program.peer[rows][IS_MESSAGE[program.op[rows]]])
    ranks = {rank, *(program.placement.rank_of_stage[stage] for stage in stages.tolist())}
    rows_of_ranks = [np.arange(*program.offsets[peer : peer + 2], dtype=np.intp) for peer in sorted(ranks)]
    return np.concatenate(rows_of_ranks)


def arrived_before(program: Program, producers: Before, rank: int) -> dict[int, tuple[int, int]]:
    """Return each receive's peer, and how many of the rank's sends to that peer have arrived once it is here."""
    first, end = program.offsets[rank : rank + 2].tolist()
    receives = first + np.flatnonzero(IS_RECEIVE[program.op[first:end]])
    peers = np.array(program.placement.rank_of_stage)[program.peer[receives]]
    used = _used(program, producers, rank)
    counts = np.zeros(len(receives), np.int64)
    for peer, rows in used.items():
        counts[peers == peer] = np.searchsorted(rows, producers[receives[peers == peer]])
    return dict(zip(receives.tolist(), zip(peers.tolist(), counts.tolist(), strict=True), strict=True))


def used_after(program: Program, producers: Before, rank: int) -> dict[int, list[int]]:
    """Return the peer's rows, from 0, after which the rank's messages to it have arrived, in their order, by peer."""
    return {peer: (rows - program.offsets[peer]).tolist() for peer, rows in _used(program, producers, rank).items()}


def _used(program: Program, producers: Before, rank: int) -> dict[int, NDArray[np.int64]]:
    """Return the rows after which a rank's sends to a peer, and all sends before each, have been used, by peer."""
    first, end = program.offsets[rank : rank + 2].tolist()
    sends = first + np.flatnonzero(IS_SEND[program.op[first:end]])
    consumer = _consumers(program, producers)[sends]
    peers = np.array(program.placement.rank_of_stage)[program.peer[sends]]
    # Messages of a channel arrive in order, so a message has been used for certain only with all those before it.
    return {peer: np.maximum.accumulate(consumer[peers == peer]) for peer in np.unique(peers).tolist()}


def _consumers(program: Program, producers: Before) -> NDArray[np.int64]:
    """[num_rows] per send, the row that computes with its message; the number of rows where none does."""
    # send <- receive <- computation: two steps back along the first predecessor of each row.
    received = receive_of_row(program, producers)
    computes = np.flatnonzero(received != NONE)
    reader = np.full(program.num_rows, program.num_rows, np.int64)
    reader[received[computes]] = computes
    receives = np.flatnonzero(IS_RECEIVE[program.op] & (producers != NONE))
    consumer = np.full(program.num_rows, program.num_rows, np.int64)
    consumer[producers[receives]] = reader[receives]
    return consumer
