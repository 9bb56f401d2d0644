"""A timeline as blocks of computation: what ran without a break, and the messages, gathers and data it waited for.

    rank 0   [F0]|data of 1|~~~~[B0] ... [F1]        ~ a message that was waited for after the data

A rank pulls the next microbatch when it is about to wait anyway, so data may cost no time at all: they cost the part of
their wait in which everything else was there.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from penstock.ir.awaits import launched_before
from penstock.ir.collectives import IS_BARRIER, IS_REDUCTION, JOINS_RANKS
from penstock.ir.deps import NONE, predecessors
from penstock.ir.operations import IS_RECEIVE
from penstock.ir.timeline import DataWait, Timeline


@dataclass(frozen=True, slots=True)
class Message:
    """A message that a block waited for."""

    producer: int
    """The block that made it."""
    arrival_s: float
    posted_s: float = -inf
    """When its receive was posted, if there is one."""
    receive: int = NONE
    """The row of its receive, if there is one."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A gathering of parameters that a block waited for, or a reduction of gradients that held its rank up."""

    row: int
    """The instruction that launched it."""
    begin_s: float
    end_s: float

    @classmethod
    def of(cls, timeline: Timeline, row: int) -> "Collective":
        return cls(row, float(timeline.start_s[row]), float(timeline.end_s[row]))


@dataclass(frozen=True, slots=True)
class Block:
    """One computation, or the two of an overlapped pair."""

    rank: int
    row: int
    num_rows: int
    start_s: float
    end_s: float
    messages: tuple[Message, ...]
    gather: Collective | None = None
    data_waits: tuple[DataWait, ...] = ()
    """Waits of its rank for data since the rank's block before."""
    reductions: tuple[Collective, ...] = ()
    """Reductions of its rank since the rank's block before, of those that `blocking_reductions` lists."""

    @property
    def rows(self) -> range:
        return range(self.row, self.row + self.num_rows)

    @property
    def local_waits(self) -> list[DataWait | Collective]:
        """Waits and reductions that held up its rank since the block before, in order."""
        return sorted((*self.data_waits, *self.reductions), key=lambda wait: wait.begin_s)

    @property
    def last_message(self) -> Message | None:
        return max(self.messages, key=lambda message: message.arrival_s, default=None)


def blocks_of(timeline: Timeline) -> list[Block]:
    """Return the blocks of a timeline, rank after rank and in the order of each rank.

    A block is one computation, or an overlapped pair of two, with everything that it may have waited for: messages, a
    gather of weights, waits for data and reductions. `Message.producer` is an index in the returned list.
    """
    program = timeline.program
    rows = program.compute_rows()
    is_second = np.zeros(program.num_instructions, np.bool_)
    is_second[1:] = program.joined[:-1]
    # The second action of a pair belongs to the block of the first one.
    block_of_row = np.full(program.num_instructions, NONE, np.int64)
    block_of_row[rows] = np.cumsum(~is_second[rows]) - 1

    source_row = predecessors(program)[:, 0]  # of each row, the row that its data comes from
    launched_columns = launched_before(program)
    data_waits = [deque(waits) for waits in waits_of_ranks(timeline)]
    reductions = blocking_reductions(timeline)
    next_row = program.offsets[:-1].tolist()  # of each rank, the row after its last block
    blocks = []
    for row in rows[~is_second[rows]].tolist():
        rank = int(program.rank_of_row[row])
        members = (row, row + 1) if program.joined[row] else (row,)
        # Reductions that hold the rank up belong to the block after them.
        first_reduction, end_reduction = np.searchsorted(reductions, (next_row[rank], row))
        blocks.append(
            Block(
                rank=rank,
                row=row,
                num_rows=len(members),
                start_s=float(timeline.start_s[row]),
                end_s=float(timeline.end_s[list(members)].max()),
                messages=tuple(_messages(timeline, members, source_row, block_of_row)),
                gather=_row_that_ends_last(
                    timeline, [int(column[member]) for column in launched_columns for member in members]
                ),
                data_waits=tuple(_take_waits(data_waits[rank], float(timeline.start_s[row]))),
                reductions=tuple(
                    Collective.of(timeline, reduction)
                    for reduction in reductions[first_reduction:end_reduction].tolist()
                ),
            )
        )
        next_row[rank] = row + len(members)
    return blocks


def in_order(blocks: Sequence[Block], num_ranks: int) -> Iterator[int]:
    """Return the indices of the blocks, each after those before it on its rank and those that made its messages."""
    waiting: list[deque[int]] = [deque() for _ in range(num_ranks)]
    for index, block in enumerate(blocks):
        waiting[block.rank].append(index)
    is_done = [False] * len(blocks)
    num_done = -1
    while num_done < sum(is_done):  # what has run can run
        num_done = sum(is_done)
        for queue in waiting:
            while queue and all(is_done[message.producer] for message in blocks[queue[0]].messages):
                is_done[queue[0]] = True
                yield queue.popleft()


def waits_of_ranks(timeline: Timeline) -> list[list[DataWait]]:
    """Return each rank's waits for data, in their order."""
    waits: list[list[DataWait]] = [[] for _ in range(timeline.num_ranks)]
    for wait in timeline.data_waits:
        waits[wait.rank].append(wait)
    return waits


def data_ready_s(timeline: Timeline, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """[len(rows)] the end of the last data wait on the row's rank before the row started; -inf without one."""
    ready_s = np.full(len(rows), -np.inf)
    ranks = timeline.program.rank_of_row[rows]
    for rank, waits in enumerate(waits_of_ranks(timeline)):
        ends_s = np.array([-np.inf, *(wait.end_s for wait in waits)])
        of_rank = np.flatnonzero(ranks == rank)
        ready_s[of_rank] = ends_s[np.searchsorted(ends_s, timeline.start_s[rows[of_rank]], side="right") - 1]
    return ready_s


def _take_waits(waits: deque[DataWait], until_s: float) -> Iterator[DataWait]:
    """Take off the waits that began before a moment; one that goes on, while a device computes, stays as well."""
    while waits and waits[0].begin_s < until_s:
        yield waits[0]
        if waits[0].end_s > until_s:
            return
        waits.popleft()


def _messages(
    timeline: Timeline, members: Sequence[int], source: NDArray[np.int32], block_of_row: NDArray[np.int64]
) -> Iterator[Message]:
    """Yield the messages that the rows of a block wait for; `source` is the row that each row's data comes from."""
    program = timeline.program
    for member in members:
        row = int(source[member])
        if row == NONE:
            continue
        if IS_RECEIVE[program.op[row]]:
            maker = source[source[row]]  # the source of a receive is its send, and that of a send is the maker
            yield Message(int(block_of_row[maker]), float(timeline.end_s[row]), float(timeline.start_s[row]), row)
        elif program.rank_of_row[row] != program.rank_of_row[member]:
            # Of a schedule that is not lowered; when its messages came is not known, at the latest for the start.
            yield Message(int(block_of_row[row]), float(timeline.start_s[member]))


def blocking_reductions(timeline: Timeline) -> NDArray[np.intp]:
    """Return the rows of barriers, and of reductions that held their rank up, as those of DDP around layers do.

    Other reductions go on while their rank runs what follows: a recorder notes their end where the rank waits for them,
    so after the start of the next row.
    """
    program = timeline.program
    if timeline.source != "measured":
        return program.rows_of((IS_REDUCTION & JOINS_RANKS) | IS_BARRIER)
    rows = program.rows_of(IS_REDUCTION | IS_BARRIER)
    next_rows = np.minimum(rows + 1, program.num_rows - 1)
    is_last_of_rank = np.isin(rows + 1, program.offsets)
    return rows[is_last_of_rank | (timeline.end_s[rows] <= timeline.start_s[next_rows])]


def _row_that_ends_last(timeline: Timeline, rows: Sequence[int]) -> Collective | None:
    """Return the collective that ends last of those that rows launched; `NONE` among the rows stands for no row."""
    collectives = [Collective.of(timeline, row) for row in rows if row != NONE]
    return max(collectives, key=lambda collective: collective.end_s, default=None)
