"""A timeline as blocks of computation: what ran without a break, and the messages and gathers that it waited for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.ir.deps import NONE, predecessors
from penstock.ir.instruction import Op
from penstock.ir.timeline import Timeline
from penstock.simulate.collectives import gather_of_row


@dataclass(frozen=True, slots=True)
class Message:
    """A message that a block waited for."""

    producer: int
    """The block that made it."""
    arrival_s: float


@dataclass(frozen=True, slots=True)
class Gather:
    """The gathering of parameters that a block waited for."""

    row: int
    """The instruction that launched it."""
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Block:
    """One computation, or the two of an overlapped pair."""

    rank: int
    row: int
    num_rows: int
    start_s: float
    end_s: float
    messages: tuple[Message, ...]
    gather: Gather | None = None

    @property
    def rows(self) -> range:
        return range(self.row, self.row + self.num_rows)

    @property
    def last_message(self) -> Message | None:
        return max(self.messages, key=lambda message: message.arrival_s, default=None)


def blocks_of(timeline: Timeline) -> list[Block]:
    """List all blocks, rank after rank, each rank's in their order; `Message.producer` indexes this list."""
    program = timeline.program
    rows = np.flatnonzero(program.is_compute)
    is_second = np.zeros(program.num_instructions, np.bool_)
    is_second[1:] = program.joined[:-1]
    block_of_row = np.full(program.num_instructions, NONE, np.int64)
    block_of_row[rows] = np.cumsum(~is_second[rows]) - 1

    before = predecessors(program)[:, 0]
    gathers, ranks = gather_of_row(program), program.rank_of_row
    found = []
    for row in rows[~is_second[rows]].tolist():
        members = (row, row + 1) if program.joined[row] else (row,)
        found.append(
            Block(
                rank=int(ranks[row]),
                row=row,
                num_rows=len(members),
                start_s=float(timeline.start_s[row]),
                end_s=float(timeline.end_s[list(members)].max()),
                messages=tuple(_messages(timeline, members, before, block_of_row)),
                gather=_gather(timeline, [int(gathers[member]) for member in members]),
            )
        )
    return found


def _messages(
    timeline: Timeline, members: Sequence[int], before: NDArray[np.int32], block_of_row: NDArray[np.int64]
) -> Iterator[Message]:
    for member in members:
        receive = int(before[member])
        if receive == NONE or not Op(int(timeline.program.op[receive])).is_receive:
            continue
        producer = before[before[receive]]
        yield Message(int(block_of_row[producer]), float(timeline.end_s[receive]))


def _gather(timeline: Timeline, rows: Sequence[int]) -> Gather | None:
    """The one that is over last."""
    gathers = [Gather(row, float(timeline.start_s[row]), float(timeline.end_s[row])) for row in rows if row != NONE]
    return max(gathers, key=lambda gather: gather.end_s, default=None)
