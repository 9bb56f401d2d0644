"""The critical path: the chain of computations and transfers that the step's length consists of.

    rank 0   F0  F1              B0  B1
    rank 1       F0  B0  F1  B1
    path     F0 >F0  B0 >F1  B1 >....B1

Walked from the last end backwards: before each block is what it waited for longest, its rank's previous block, a
message, a collective of its rank, or the data of a microbatch. Before a barrier is what the last rank did that came to
it. A start that none of them explains comes after a pause of the rank itself. The pieces add up to the makespan.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from penstock.ir.collectives import IS_BARRIER
from penstock.ir.timeline import DataWait, Timeline
from penstock.simulation.blocks import Block, blocks_of

Doing = Literal["compute", "transfer", "collective", "data", "pause"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of the critical path."""

    doing: Doing
    rank: int
    """The rank that computes, pauses or waits for data, or that the message goes to."""
    row: int
    """The row of the program that computes, or whose start the transfer, collective, wait or pause leads to."""
    duration_s: float


def critical_path(timeline: Timeline) -> list[Piece]:
    """Return the pieces of the critical path, from the first start of the step to its last end."""
    blocks = blocks_of(timeline)
    if not blocks:
        return []
    is_first = [index == 0 or blocks[index - 1].rank != block.rank for index, block in enumerate(blocks)]
    previous = [None if first else index - 1 for index, first in enumerate(is_first)]
    begin_s = min(block.start_s for block in blocks)
    last = max(range(len(blocks)), key=lambda index: (blocks[index].end_s, -blocks[index].rank))
    index: int | None = last
    until_s = blocks[last].end_s
    pieces: list[Piece] = []
    while index is not None:
        block = blocks[index]
        pieces.append(Piece("compute", block.rank, block.row, until_s - block.start_s))
        index, until_s = _step_back(timeline, blocks, previous, index, begin_s, pieces)
    pieces.reverse()
    return pieces


def _step_back(
    timeline: Timeline,
    blocks: Sequence[Block],
    previous: Sequence[int | None],
    index: int,
    begin_s: float,
    pieces: list[Piece],
) -> tuple[int | None, float]:
    """Add the pieces between a block and the block before it on the path.

    Return the index of the latter, None at the start of the path, and the time at which its part of the path ends.
    `previous` are the indices of the blocks before on the same rank.
    """
    block = blocks[index]
    previous_index, message, gather = previous[index], block.last_message, block.gather
    free_s = begin_s if previous_index is None else min(blocks[previous_index].end_s, block.start_s)
    arrival_s = free_s if message is None else message.arrival_s
    if gather is not None and gather.end_s > max(free_s, arrival_s, gather.begin_s):  # one at no cost holds up nothing
        return _step_over_gather(blocks, previous, index, begin_s, pieces)
    data_ready_s = max((wait.end_s for wait in block.local_waits), default=free_s)
    if message is None or arrival_s <= max(free_s, data_ready_s):
        barrier_rows = [wait.row for wait in block.reductions if IS_BARRIER[timeline.program.op[wait.row]]]
        if barrier_rows:
            return _step_over_barriers(timeline, blocks, index, barrier_rows[-1], begin_s, pieces)
        _add_pause(pieces, block, free_s, block.start_s)
        return previous_index, free_s
    arrival_s = min(arrival_s, block.start_s)
    produced_s = min(blocks[message.producer].end_s, arrival_s)
    _add(pieces, "pause", block, block.start_s - arrival_s)
    _add(pieces, "transfer", block, arrival_s - produced_s)
    return message.producer, produced_s


def _step_over_gather(
    blocks: Sequence[Block], previous: Sequence[int | None], index: int, begin_s: float, pieces: list[Piece]
) -> tuple[int | None, float]:
    """Add the pieces before a block that waited for a gather, and return what `_step_back` returns.

    The block before it on the path is the last one that its rank ran before it launched the gather.
    """
    block = blocks[index]
    gather, launcher = block.gather, previous[index]
    assert gather is not None
    while launcher is not None and blocks[launcher].row > gather.row:
        launcher = previous[launcher]
    end_s = min(gather.end_s, block.start_s)
    launched_s = max(begin_s, min(gather.begin_s, end_s))
    free_s = begin_s if launcher is None else min(blocks[launcher].end_s, launched_s)
    _add_pause(pieces, block, end_s, block.start_s)
    _add(pieces, "collective", block, end_s - launched_s)
    _add_pause(pieces, block, free_s, launched_s)
    return launcher, free_s


def _step_over_barriers(
    timeline: Timeline, blocks: Sequence[Block], index: int, row: int, begin_s: float, pieces: list[Piece]
) -> tuple[int | None, float]:
    """Add the pieces before a block that waited in a barrier, whose row is `row`; return what `_step_back` returns.

    The block before it on the path is the last one of the rank that came last to the barrier. Where that rank came from
    another barrier, the same is true of that one.
    """
    program, block, row_of_block = timeline.program, blocks[index], [other_block.row for other_block in blocks]
    barriers = program.rows_of(IS_BARRIER).reshape(program.num_ranks, -1)
    number = int(np.flatnonzero(barriers[block.rank] == row)[0])
    until_s = min(float(timeline.end_s[row]), block.start_s)
    _add_pause(pieces, block, until_s, block.start_s)
    while True:
        last = int(barriers[np.argmax(timeline.start_s[barriers[:, number]]), number])
        rank = int(program.rank_of_row[last])
        block_before = bisect_left(row_of_block, last) - 1
        has_block = block_before >= 0 and blocks[block_before].rank == rank
        is_behind_barrier = number > 0 and not (has_block and barriers[rank, number - 1] < row_of_block[block_before])
        came_s = min(float(timeline.start_s[last]), until_s)
        free_s = begin_s
        if is_behind_barrier:
            free_s = float(timeline.end_s[barriers[rank, number - 1]])
        elif has_block:
            free_s = blocks[block_before].end_s
        free_s = min(free_s, came_s)
        _add(pieces, "collective", block, until_s - came_s)
        _add(pieces, "pause", block, came_s - free_s)
        if not is_behind_barrier:
            return block_before if has_block else None, free_s
        number, until_s = number - 1, free_s


def _add_pause(pieces: list[Piece], block: Block, begin_s: float, end_s: float) -> None:
    """Add the time before a block, from its end back: waits for data or a reduction as such, the rest as pauses."""
    for wait in reversed(block.local_waits):
        wait_begin_s, wait_end_s = max(wait.begin_s, begin_s), min(wait.end_s, end_s)
        if wait_begin_s < wait_end_s:
            _add(pieces, "pause", block, end_s - wait_end_s)
            doing: Doing = "data" if isinstance(wait, DataWait) else "collective"
            _add(pieces, doing, block, wait_end_s - wait_begin_s)
            end_s = wait_begin_s
    _add(pieces, "pause", block, end_s - begin_s)


def _add(pieces: list[Piece], doing: Doing, block: Block, duration_s: float) -> None:
    if duration_s > 0:
        pieces.append(Piece(doing, block.rank, block.row, duration_s))
