"""All blocks of some timelines as columns of whole numbers, lane after lane: what the page's viewer draws.

A lane is what one rank does in one timeline; the lanes of a rank stand together. A block starts `gap` ticks after the
block before it has ended, and takes `duration` ticks. `producer` is the block whose message it waited for, and
`transfer` the ticks from that one's end until the message was there. Small differences compress well, and blocks that
touch still touch after rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.deps import NONE
from penstock.ir.timeline import Timeline
from penstock.show.columns import tick_for, whole_ticks
from penstock.show.curve import MemoryLevels, memory_levels
from penstock.show.layout import Blocks, blocks_of_rank
from penstock.show.waits import Waits, waits_of
from penstock.simulate.critical import critical_path

Columns = dict[str, NDArray[Any]]
UPPER, LOWER = 1, 2
"""The halves of an overlapped pair, in the column `half`; 0 is a whole block."""


@dataclass(frozen=True, slots=True)
class TableLane:
    """Which blocks of the table are those of one rank in one timeline."""

    rank: int
    timeline: int
    first: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """The columns, and what their numbers mean."""

    columns: Columns
    lanes: list[TableLane]
    tick_s: float
    is_bytes: bool
    """Whether `held` and `kept` are bytes; else activations."""


@dataclass(frozen=True, slots=True, eq=False)
class _Facts:
    """What is known of a timeline's rows."""

    timeline: Timeline
    levels: MemoryLevels
    waits: Waits
    is_critical: NDArray[np.bool_]
    index_of_row: NDArray[np.int64]
    """Where each row lies in the table; `NONE` for what computes nothing."""


def block_table(timelines: Sequence[Timeline]) -> BlockTable:
    """Lay out the blocks of timelines of one number of ranks, rank by rank."""
    in_bytes = all(timeline.activation_bytes.any() for timeline in timelines)
    tick_s = tick_for(max(timeline.makespan_s for timeline in timelines))
    lanes: list[TableLane] = []
    laid: list[tuple[int, Blocks]] = []
    facts = [_facts_of(timeline, in_bytes=in_bytes) for timeline in timelines]
    first = 0
    for rank in range(max(timeline.num_ranks for timeline in timelines)):
        for index, timeline in enumerate(timelines):
            blocks = blocks_of_rank(timeline, rank)
            facts[index].index_of_row[blocks.row] = first + np.arange(len(blocks))
            lanes.append(TableLane(rank, index, first, len(blocks)))
            laid.append((index, blocks))
            first += len(blocks)
    parts = [_columns(facts[index], blocks, tick_s, in_bytes=in_bytes) for index, blocks in laid]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return BlockTable(columns, lanes, tick_s, in_bytes)


def _facts_of(timeline: Timeline, *, in_bytes: bool) -> _Facts:
    num_rows = timeline.program.num_instructions
    is_critical = np.zeros(num_rows, np.bool_)
    for piece in critical_path(timeline):
        if piece.doing == "compute":
            is_critical[piece.row] = True
    joined = np.flatnonzero(timeline.program.joined)
    is_critical[joined + 1] = is_critical[joined]
    levels = memory_levels(timeline, in_bytes=in_bytes)
    return _Facts(timeline, levels, waits_of(timeline), is_critical, np.full(num_rows, NONE, np.int64))


def _columns(facts: _Facts, blocks: Blocks, tick_s: float, *, in_bytes: bool) -> Columns:
    program = facts.timeline.program
    rows = blocks.row
    begin, end = whole_ticks(blocks.start_s, tick_s), whole_ticks(blocks.end_s, tick_s)
    producer = facts.waits.producer[rows]
    made = whole_ticks(facts.timeline.end_s[producer], tick_s)
    transfer = whole_ticks(facts.waits.arrival_s[rows], tick_s) - made
    amount = np.float64 if in_bytes else np.uint32
    return {
        "gap": (begin - np.append(0, end[:-1])[: len(end)]).astype(np.int32),
        "duration": (end - begin).astype(np.uint32),
        "kind": blocks.kind.astype(np.uint8),
        "half": np.where(blocks.low > 0, UPPER, np.where(blocks.high < 1, LOWER, 0)).astype(np.uint8),
        "shade": blocks.shade.astype(np.uint8),
        "stage": program.stage[rows].astype(np.uint32),
        "microbatch": program.microbatch[rows].astype(np.uint32),
        "slice": program.slice[rows].astype(np.uint32),
        "producer": np.where(producer == NONE, NONE, facts.index_of_row[producer]).astype(np.int32),
        "transfer": np.where(producer == NONE, 0, transfer).astype(np.int32),
        "held": facts.levels.held[rows].astype(amount),
        "kept": facts.levels.kept[rows].astype(amount),
        "critical": facts.is_critical[rows].astype(np.uint8),
    }
