"""All blocks of some timelines as columns of whole numbers, lane after lane: the viewer of the page draws them.

A lane is what one rank does in one timeline; the lanes of a rank are next to each other. A block starts `gap` ticks
after the block before it has ended, and takes `duration` ticks. `producer` is the block whose message it waited for,
and `transfer` the ticks from that one's end until the message was there. A block does not wait for what is earlier on
its own rank: that rank was busy. Small differences compress well, and blocks that touch still touch after rounding.

    rank 0   [0F0]            producer of 1F0 is 0F0
    rank 1        >>[1F0]     its message arrives where 1F0 may start

Bars, the collectives and optimizer steps, have their own columns, laid out the same way lane after lane; so have the
causes of idle time, of which a lane of n blocks has those of n + 1 gaps: before each block, and after the last.

A page has the columns one after the other, compressed and written as text:

    gzip( [column 0][column 1]... )  in base64, and beside it where each column begins and of what type it is

Each column begins at a multiple of 8 bytes, so that a browser can look at it in place. Compressing without a date gives
the same text for the same numbers.
"""

import gzip
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.ir.awaits import receive_of_row
from penstock.ir.deps import NONE, predecessors
from penstock.ir.operations import KIND_INDEX
from penstock.ir.timeline import Timeline
from penstock.show.bars import bars_of_rank, last_end_s
from penstock.show.curve import knows_bytes, memory_levels
from penstock.show.layout import Blocks, Floats, Ints, blocks_of_rank
from penstock.simulation.causes import Cause, IdleSpan, accounts_of
from penstock.simulation.costs.costs import Costs
from penstock.simulation.costs.fit import costs_from_timeline
from penstock.simulation.critical import critical_path
from penstock.simulation.message_latency import with_true_arrivals

Columns = dict[str, NDArray[Any]]
ALIGNMENT = 8
TYPES = ("uint8", "int32", "uint32", "float64")
UPPER, LOWER = 1, 2
"""The halves of an overlapped pair, in the column `half`; 0 is a whole block."""


@dataclass(frozen=True, slots=True)
class TableLane:
    """The place in the table of the blocks and bars of one rank in one timeline: the first one, and their number."""

    rank: int
    timeline: int
    first: int
    count: int
    first_bar: int
    num_bars: int


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """The columns of all blocks and bars, the lanes that they are of, and the units of their numbers."""

    columns: Columns
    lanes: list[TableLane]
    tick_s: float
    is_bytes: bool
    """Whether `held` and `kept` are bytes; else microbatches, of which a stage and slice have a share."""
    bar_names: list[tuple[str, int]]
    """Instruction and sort of bars; the column `bar_name` has indices into this list."""


@dataclass(frozen=True, slots=True, eq=False)
class IdleGaps:
    """The idle time of one rank by cause: one entry per gap and cause, gap by gap."""

    gap: Ints
    """The number of the rank's blocks before the gap."""
    cause: Ints
    duration_s: Floats


@dataclass(frozen=True, slots=True, eq=False)
class _Facts:
    """The numbers of a timeline's rows that the columns of its blocks are taken from."""

    timeline: Timeline
    levels_during: Ints
    """[num_rows] The activations or bytes that the rank holds while the row runs."""
    levels_after: Ints
    """[num_rows] The activations or bytes that the rank holds from the row's end until the next one starts."""
    producer: Ints
    arrival_s: Floats
    is_critical: NDArray[np.bool_]
    idle: list[IdleGaps]
    index_of_row: Ints
    """The place of each row in the table; `NONE` for a row that computes nothing."""


def block_table(timelines: Sequence[Timeline], costs: Sequence[Costs | None] = ()) -> BlockTable:
    """Lay out timelines with the same number of ranks for a page: one lane per rank and timeline, in one table.

    A block is a computation or an overlapped pair; the table has a row per block, lane after lane, with times in ticks.
    A bar is a collective or copy beside the blocks. `costs` are those that each timeline was predicted with; None, or
    an empty sequence, where they are not known.

    Raises:
        ConfigError: for timelines of different numbers of ranks.
    """
    num_ranks = sorted({timeline.num_ranks for timeline in timelines})
    if len(num_ranks) > 1:
        counts = " and ".join(map(str, num_ranks))
        raise ConfigError(f"they have {counts} ranks; show timelines of one number of ranks together", key="timelines")
    in_bytes = all(map(knows_bytes, timelines))
    tick_s = tick_for(max(map(last_end_s, timelines)))
    lanes: list[TableLane] = []
    blocks_of_lanes: list[tuple[int, Blocks]] = []
    bar_columns: list[Columns] = []
    bar_names: dict[tuple[str, int], int] = {}
    timelines_with_costs = zip(timelines, costs or [None] * len(timelines), strict=True)
    facts_of_timelines = [
        _facts_of(timeline, costs_of_timeline, in_bytes=in_bytes)
        for timeline, costs_of_timeline in timelines_with_costs
    ]
    first_block = first_bar = 0
    for rank in range(num_ranks[0]):
        for index, timeline in enumerate(timelines):
            blocks = blocks_of_rank(timeline, rank)
            facts_of_timelines[index].index_of_row[blocks.row] = first_block + np.arange(len(blocks))
            bars = _bar_columns(timeline, rank, tick_s, bar_names)
            num_bars = len(bars["bar_gap"])
            # A lane of n blocks has n + 1 gaps, so the index of its first gap is that of its first block plus the lanes
            # so far.
            bar_columns.append(
                bars | _idle_columns(facts_of_timelines[index].idle[rank], first_block + len(lanes), tick_s)
            )
            lanes.append(TableLane(rank, index, first_block, len(blocks), first_bar, num_bars))
            blocks_of_lanes.append((index, blocks))
            first_block, first_bar = first_block + len(blocks), first_bar + num_bars
    # Columns come in a second pass: the block that made a message may be in a lane further down, which has indices only
    # now.
    columns_of_lanes = [
        _columns_of_lane(facts_of_timelines[index], blocks, tick_s, in_bytes=in_bytes) | more_columns
        for (index, blocks), more_columns in zip(blocks_of_lanes, bar_columns, strict=True)
    ]
    columns = {name: np.concatenate([lane[name] for lane in columns_of_lanes]) for name in columns_of_lanes[0]}
    return BlockTable(columns, lanes, tick_s, in_bytes, list(bar_names))


def _facts_of(timeline: Timeline, costs: Costs | None, *, in_bytes: bool) -> _Facts:
    num_rows = timeline.program.num_instructions
    is_critical = np.zeros(num_rows, np.bool_)
    for piece in critical_path(timeline):
        if piece.doing == "compute":
            is_critical[piece.row] = True
    joined = np.flatnonzero(timeline.program.joined)
    is_critical[joined + 1] = is_critical[joined]
    levels = memory_levels(timeline, in_bytes=in_bytes)
    index_of_row = np.full(num_rows, NONE, np.int64)
    return _Facts(timeline, *levels, *waits_of(timeline), is_critical, idle_gaps(timeline, costs), index_of_row)


def _bar_columns(timeline: Timeline, rank: int, tick_s: float, names: dict[tuple[str, int], int]) -> Columns:
    """Lay out the bars of one rank; `names`, indices by instruction and sort of a bar, grows by those it lacks."""
    bars = bars_of_rank(timeline, rank)
    begin, end = whole_ticks(bars.start_s, tick_s), whole_ticks(bars.end_s, tick_s)
    bar_keys = zip((str(timeline.program.instruction(int(row))) for row in bars.row), bars.sort.tolist(), strict=True)
    return {
        "bar_gap": (begin - np.append(0, end[:-1])[: len(end)]).astype(np.int32),
        "bar_duration": (end - begin).astype(np.uint32),
        "bar_name": np.array([names.setdefault(name, len(names)) for name in bar_keys], np.uint32),
    }


def _idle_columns(gaps: IdleGaps, first: int, tick_s: float) -> Columns:
    return {
        "idle_gap": (first + gaps.gap).astype(np.uint32),
        "idle_cause": gaps.cause.astype(np.uint8),
        "idle_ticks": whole_ticks(gaps.duration_s, tick_s).astype(np.uint32),
    }


def _columns_of_lane(facts: _Facts, blocks: Blocks, tick_s: float, *, in_bytes: bool) -> Columns:
    program = facts.timeline.program
    rows = blocks.row
    begin, end = whole_ticks(blocks.start_s, tick_s), whole_ticks(blocks.end_s, tick_s)
    producer = facts.producer[rows]
    producer_end = whole_ticks(facts.timeline.end_s[producer], tick_s)
    transfer = whole_ticks(facts.arrival_s[rows], tick_s) - producer_end
    microbatch_unit = 1.0 if in_bytes else float(program.parts_per_rank)
    return {
        "gap": (begin - np.append(0, end[:-1])[: len(end)]).astype(np.int32),
        "duration": (end - begin).astype(np.uint32),
        "kind": KIND_INDEX[blocks.kind].astype(np.uint8),
        "half": np.where(blocks.low > 0, UPPER, np.where(blocks.high < 1, LOWER, 0)).astype(np.uint8),
        "shade": blocks.shade.astype(np.uint8),
        "stage": program.stage[rows].astype(np.uint32),
        "microbatch": program.microbatch[rows].astype(np.uint32),
        "slice": program.slice[rows].astype(np.uint32),
        "producer": np.where(producer == NONE, NONE, facts.index_of_row[producer]).astype(np.int32),
        "transfer": np.where(producer == NONE, 0, transfer).astype(np.int32),
        "held": facts.levels_during[rows] / microbatch_unit,
        "kept": facts.levels_after[rows] / microbatch_unit,
        "critical": facts.is_critical[rows].astype(np.uint8),
    }


def waits_of(timeline: Timeline) -> tuple[Ints, Floats]:
    """Return, per row, the row that made the last message that it needs, and when that message was there.

    They are `NONE` and 0 for a computation that needs none, and meaningless for rows that compute nothing. Of an
    overlapped pair, both wait for the later message.
    """
    program = timeline.program
    source = predecessors(program)[:, 0]
    received = receive_of_row(program, source)
    needs = np.flatnonzero(received != NONE)
    producer = np.full(program.num_instructions, NONE, np.int64)
    arrival_s = np.zeros(program.num_instructions)
    receives = received[needs]  # of each row that needs a message, the receive that takes it
    arrival_s[needs] = timeline.end_s[receives]
    producer[needs] = source[source[receives]]  # a receive follows its send, and a send what made the message
    first = np.flatnonzero(program.joined)
    later = np.where(arrival_s[first] >= arrival_s[first + 1], first, first + 1)
    for half in (first, first + 1):
        producer[half], arrival_s[half] = producer[later], arrival_s[later]
    return producer, arrival_s


def idle_gaps(timeline: Timeline, costs: Costs | None = None) -> list[IdleGaps]:
    """Return the causes of every rank's idle time.

    `costs` are those that the timeline was predicted with; without them, its own typical durations are taken, as for a
    measured one.
    """
    if timeline.source == "measured":
        timeline = with_true_arrivals(timeline)
    accounts = accounts_of(timeline, costs or costs_from_timeline(timeline))
    starts = [timeline.start_s[timeline.compute_rows(rank)] for rank in range(timeline.num_ranks)]
    return [_gaps_of_rank(account.spans, start_s) for account, start_s in zip(accounts, starts, strict=True)]


def _gaps_of_rank(spans: Sequence[IdleSpan], start_s: NDArray[np.float64]) -> IdleGaps:
    begin_s, end_s, cause = np.array(spans, np.float64).reshape(-1, 3).T
    # A span ends where a block starts, or before; rounding cannot put its middle on the wrong side.
    gap = np.searchsorted(start_s, (begin_s + end_s) / 2)
    gap_and_cause, index = np.unique(gap * len(Cause) + cause.astype(np.int64), return_inverse=True)
    duration_s = np.zeros(len(gap_and_cause))
    np.add.at(duration_s, index, end_s - begin_s)
    return IdleGaps(gap_and_cause // len(Cause), gap_and_cause % len(Cause), duration_s)


def pack(columns: Mapping[str, NDArray[Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Pack columns of the types `TYPES` into a text, and return it with its table of contents.

    The table has, per column, the name, the type, the offset in bytes, and the length in numbers.
    """
    parts: list[bytes] = []
    contents: list[dict[str, Any]] = []
    offset = 0
    for name, column in columns.items():
        type_name = column.dtype.name
        assert type_name in TYPES, f"column {name} is of type {type_name}"
        data = column.astype(column.dtype.newbyteorder("<")).tobytes()
        contents.append({"name": name, "type": type_name, "offset": offset, "length": len(column)})
        parts.append(data + bytes(-len(data) % ALIGNMENT))
        offset += len(parts[-1])
    packed = gzip.compress(b"".join(parts), compresslevel=9, mtime=0)
    return b64encode(packed).decode(), contents


def whole_ticks(seconds: NDArray[np.float64], tick_s: float) -> NDArray[np.int64]:
    """Return times as whole numbers of ticks: equal times stay equal."""
    return np.rint(seconds / tick_s).astype(np.int64)


def tick_for(end_s: float) -> float:
    """Return the smallest power of ten, in seconds, of which 31 bits count enough for `end_s`."""
    if end_s <= 0:
        return 1.0
    exponent = int(np.ceil(np.log10(end_s / (2**31 - 1))))
    return float(f"1e{exponent}")
