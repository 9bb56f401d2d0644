"""Dependencies: the rows that must end before a row of a schedule or program can start.

    F(s, b, q)   after F(s-1, b, q) or its receive, and F(s, b, q-1)       keys and values of earlier slices
    R(s, b, q)   after F(s, b, q)
    B|I(s, b, q) after B|I(s+1, b, q) or its receive, R or F(s, b, q), and B|I(s, b, q+1)
    W(s, b, q)   after I(s, b, q)
    send         after the action that makes the message;  receive after its send

s-1 and s+1 are the neighbors on the microbatch's route. The rules are those of `ir.operations`, row by row of its
table. The order of a rank itself is not repeated here.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.ir.hot import Int32s, Int64s, blocks
from penstock.ir.operations import MESSAGES, OPERATIONS, At, Lane, Op, Read, exclusive, makers, peer_at
from penstock.ir.table import Table
from penstock.placement import Placement

NUM_PREDECESSORS = 3
NONE = -1
"""Stands for "no such row" in tables of rows."""

PLANES = sorted({exclusive(op) for op in Op if not OPERATIONS[op].is_of_stage})
"""The planes of a `RowIndex`; each holds all operations that exclude each other."""


@dataclass(frozen=True, slots=True, eq=False)
class RowIndex:
    """Where each (stage, microbatch, slice) is computed, sent and received: planes of rows, `NONE` for none.

    Of duplicates the last one counts; they are for `check` to find.
    """

    table: Table
    planes: tuple[Op, ...]
    rows: Int32s
    """The planes that have rows one after the other, and a last cell that is `NONE`."""

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.table.num_stages, self.table.num_microbatches, self.table.num_slices

    @property
    def end(self) -> int:
        """The last cell of all."""
        return len(self.rows) - 1

    def plane(self, op: Op) -> Int32s:
        """[num_stages, num_microbatches, num_slices] the rows of an operation and of those that exclude it."""
        if exclusive(op) not in self.planes:
            return np.full(self.shape, NONE, np.int32)
        size = num_identities(self.table)
        begin = self.planes.index(exclusive(op)) * size
        return self.rows[begin : begin + size].reshape(self.shape)

    def lookup(self, planes: dict[Op, tuple[Op, Int64s]]) -> Int64s:
        """[num_ops x num_stages] the first cell of the plane and stage that an operation looks at, else the last cell.

        `planes` are by operation: the plane, and [num_stages] the stage that is looked at for each stage.
        """
        first = np.full((len(Op), self.table.num_stages), self.end, np.int64)
        per_stage = self.table.num_microbatches * self.table.num_slices
        for op, (plane, stages) in planes.items():
            is_there = stages != NONE
            offset = self.planes.index(plane) * self.table.num_stages
            first[op, is_there] = (offset + stages[is_there]) * per_stage
        return first.reshape(-1)

    def cells(self, lookup: Int64s, part: slice, slice_shift: int = 0) -> Int64s:
        """[num_rows] the cells that a block of rows looks at, through a `lookup`; the last cell of all for none.

        `slice_shift` is the slice that is looked at minus the slice of the row.
        """
        table, num_slices = self.table, self.table.num_slices
        cell: Int64s = lookup.take(table.op[part].astype(np.intp) * table.num_stages + table.stage[part])
        if num_slices == 1:
            cell += table.microbatch[part]
        else:
            cell += table.microbatch[part].astype(np.int64) * num_slices
            cell += table.slice[part]
        if slice_shift:
            shifted = table.slice[part] + slice_shift
            cell += slice_shift
            # Past the first or last slice the cell would be that of another microbatch.
            cell[(shifted < 0) | (shifted >= num_slices)] = self.end
        # The last cell plus a microbatch is past the end: clip it back to the last cell, which holds `NONE`.
        np.minimum(cell, self.end, out=cell)
        return cell


def index_rows(table: Table) -> RowIndex:
    """Find the row of every action (and message) of the table."""
    planes = tuple(plane for plane in PLANES if any(exclusive(op) is plane for op in table.ops))
    index = RowIndex(table, planes, np.full(len(planes) * num_identities(table) + 1, NONE, np.int32))
    stages = np.arange(table.num_stages)
    lookup = index.lookup({op: (exclusive(op), stages) for op in table.ops if exclusive(op) in planes})
    for part in blocks(table.num_rows):
        index.rows[index.cells(lookup, part)] = np.arange(part.start, part.stop)
    index.rows[-1] = NONE  # rows without a cell, such as collectives, were written there
    return index


def predecessors(table: Table) -> Int32s:
    """Return [num_rows, 3] the rows that each row waits for, `NONE` where there are fewer.

    Column 0 is where the data comes from, column 1 the saved activation (or earlier slice), column 2 the later slice.
    """
    index = index_rows(table)
    sources = list(_sources(table, index))
    result = np.full((table.num_rows, NUM_PREDECESSORS), NONE, np.int32)
    for part in blocks(table.num_rows):
        for source in sources:
            # Sources come with the preferred last: a receive overwrites the action that made the value, R overwrites F.
            column = result[part, source.column]
            rows = index.rows[index.cells(source.lookup, part, source.slice_shift)]
            np.copyto(column, rows, where=rows != NONE)
    return result


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """The rows that some operations wait for; a later source replaces rows of an earlier one."""

    column: int
    """The column of `predecessors` that the source fills."""
    slice_shift: int
    lookup: Int64s


SLICE_SHIFT = {At.EARLIER_SLICE: -1, At.LATER_SLICE: 1}


def _sources(table: Table, index: RowIndex) -> Iterator[_Source]:
    """Yield the sources by column and preference, the preferred last."""
    # Why one lookup serves all rows of a column: all predecessors of a row have its microbatch. So from the number of a
    # row's cell (stage, microbatch, slice) to that of its predecessor's it is a constant, which depends on the row's
    # operation and stage alone: another plane, another stage of the route, the slice before or behind. Where a route
    # or the slices end, the cell is the last one, which holds NONE. Of operations that exclude each other (B and I)
    # one plane has the row that is there. Where two rows could have made a value, both are looked up, the preferred
    # one last, and it overwrites the other if it is there: a receive that of the maker, R that of F.
    planes_of_source: dict[tuple[int, int, int], dict[Op, tuple[Op, Int64s]]] = {}
    reads = [(op, read) for op in table.ops for read in OPERATIONS[op].reads]
    for op, read in reads:
        # With one slice there is no earlier or later slice to wait for. Preferences are negated, since sources are
        # sorted and the preferred one (number 0) has to be written last.
        shift = SLICE_SHIFT.get(read.at, 0)
        is_absent = read.column is None or (shift and table.num_slices == 1)
        for preference, (plane, at) in () if is_absent else enumerate(_places(op, read)):
            if plane in index.planes:
                planes_by_op = planes_of_source.setdefault((read.column or 0, -preference, shift), {})
                planes_by_op[op] = (plane, stages_at(table.placement, at))
    for (column, _, shift), planes in sorted(planes_of_source.items(), key=lambda item: item[0]):
        yield _Source(column, shift, index.lookup(planes))


def _places(op: Op, read: Read) -> Iterator[tuple[Op, At]]:
    """Yield the planes and stages of the rows that an operation may wait for, the preferred first."""
    send, receive = MESSAGES.get(read.value, (None, None))
    lane = OPERATIONS[op].lane
    if send is not None and lane is Lane.RECEIVE:  # it waits for its send, whoever made the value
        yield send, read.at
        return
    if receive is not None and lane is Lane.COMPUTE:
        yield receive, At.OWN
    yield from dict.fromkeys((exclusive(maker), read.at) for maker in makers(read.value))


def stages_at(placement: Placement, at: At) -> Int64s:
    """[num_stages] the stage upstream or downstream of each stage, or itself; `NONE` where there is none."""
    if at is At.UPSTREAM:
        return np.array(placement.previous_stage, np.int64)
    if at is At.DOWNSTREAM:
        return np.array(placement.next_stage, np.int64)
    stages = np.arange(placement.num_stages)
    if at is At.BATCH:
        is_inner = (np.array(placement.previous_stage) != NONE) & (np.array(placement.next_stage) != NONE)
        return np.where(is_inner, NONE, stages)
    return stages


def peers_of_messages(placement: Placement) -> Int32s:
    """[num_ops, num_stages] the stage at the other end of a stage's message, `NONE` where there is none."""
    peers = np.full((len(Op), placement.num_stages), NONE, np.int32)
    for send_and_receive in MESSAGES.values():
        for op in send_and_receive:
            peers[op] = stages_at(placement, peer_at(op))
    return peers


def identities(table: Table) -> Int32s:
    """[num_rows] a number for each (stage, microbatch, slice), below `num_identities`."""
    result = np.empty(table.num_rows, np.int32)
    for part in blocks(table.num_rows):
        result[part] = identities_of(table, part)
    return result


def identities_of(table: Table, part: slice) -> Int32s:
    """Return `identities` for some rows."""
    identity = table.stage[part] * np.int32(table.num_microbatches)
    identity += table.microbatch[part]
    if table.num_slices > 1:
        identity *= np.int32(table.num_slices)
        identity += table.slice[part]
    return identity


def num_identities(table: Table) -> int:
    """Return how many (stage, microbatch, slice) there are."""
    return table.num_stages * table.num_microbatches * table.num_slices


def deciding(predecessor_rows: Int32s) -> Int32s:
    """Return those columns of `predecessors` that decide when a row can start; the first may be all that matters.

    The others, saved activations and other slices, are of the same rank: where they are earlier, its order is enough.
    """
    for part in blocks(len(predecessor_rows)):
        if (predecessor_rows[part, 1:] >= np.arange(part.start, part.stop)[:, np.newaxis]).any():
            return predecessor_rows
    return predecessor_rows[:, :1].copy()
