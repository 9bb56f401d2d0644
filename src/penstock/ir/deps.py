"""What comes before what: the rows that must be done before a row can start, for schedules and programs alike.

    F(s, b, q)   after F(s-1, b, q) or its receive, and F(s, b, q-1)       keys and values of earlier slices
    B|I(s, b, q) after B|I(s+1, b, q) or its receive, F(s, b, q), and B|I(s, b, q+1)
    W(s, b, q)   after I(s, b, q)
    send         after the action that makes the message;  receive after its send

s-1 and s+1 are the neighbours on the microbatch's route. What stands earlier on the same rank is not repeated here.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.hot import blocks
from penstock.ir.instruction import Op
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule

Cells = NDArray[np.int64]
NUM_PREDECESSORS = 3
NONE = -1
"""Stands for "no such row" in tables of rows."""


class Plane(IntEnum):
    """The planes of a `RowIndex`; a schedule has the first three alone."""

    FORWARD = 0
    BACKWARD = 1
    """Whole backward or input part."""
    WEIGHT = 2
    SEND_FORWARD = 3
    RECEIVE_FORWARD = 4
    SEND_BACKWARD = 5
    RECEIVE_BACKWARD = 6


PLANE_OF_OP = {
    Op.FORWARD: Plane.FORWARD,
    Op.BACKWARD: Plane.BACKWARD,
    Op.BACKWARD_INPUT: Plane.BACKWARD,
    Op.BACKWARD_WEIGHT: Plane.WEIGHT,
    Op.SEND_FORWARD: Plane.SEND_FORWARD,
    Op.RECEIVE_FORWARD: Plane.RECEIVE_FORWARD,
    Op.SEND_BACKWARD: Plane.SEND_BACKWARD,
    Op.RECEIVE_BACKWARD: Plane.RECEIVE_BACKWARD,
}


@dataclass(frozen=True, slots=True, eq=False)
class RowIndex:
    """Where each (stage, microbatch, slice) is computed, sent and received: planes of rows, `NONE` where nowhere.

    Entries outside the schedule's ranges are left out; of duplicates the last one counts. Both are for `check` to find.
    """

    cells: NDArray[np.int32]
    """All planes one behind the other, and a last cell that is `NONE`."""
    shape: tuple[int, int, int]

    def plane(self, plane: Plane) -> NDArray[np.int32]:
        """[num_stages, num_microbatches, num_slices] the rows of one plane."""
        size = int(np.prod(self.shape))
        return self.cells[plane * size : (plane + 1) * size].reshape(self.shape)


def index_rows(table: Schedule | Program) -> RowIndex:
    """Find the row of every action (and message) of the table."""
    places = _Places(table)
    lookup = places.lookup()
    for op, plane in PLANE_OF_OP.items():
        if plane < places.num_planes:
            lookup[op] = plane * places.num_stages + np.arange(places.num_stages)
    where = np.full(places.num_cells + 1, NONE, np.int32)
    for part in blocks(places.num_rows):
        where[places.of(part).cells(lookup)] = np.arange(part.start, part.stop)
    where[-1] = NONE  # the rows that have no cell of their own were put there
    return RowIndex(where, places.shape)


def predecessors(table: Schedule | Program, rows: RowIndex | None = None) -> NDArray[np.int32]:
    """Return [num_rows, 3] the rows that each row waits for, `NONE` where there are fewer.

    Column 0 is where the data comes from, column 1 the saved activation (or earlier slice), column 2 the later slice.
    """
    where = (index_rows(table) if rows is None else rows).cells
    places = _Places(table)
    waits = _Waits.of(table, places)
    result = np.empty((places.num_rows, NUM_PREDECESSORS), np.int32)
    for part in blocks(places.num_rows):
        place = places.of(part)
        data, saved, later = result[part].T
        data[:] = where[place.cells(waits.data)]
        saved[:] = where[place.cells(waits.saved)]
        if isinstance(table, Program):
            # A receive, where there is one, takes the place of the neighbour's action.
            receive = where[place.cells(waits.receive)]
            np.copyto(data, receive, where=receive != NONE)
        later[:] = NONE
        if table.num_slices > 1:
            np.maximum(saved, where[place.cells(waits.earlier_slice, shift=-1)], out=saved)
            later[:] = where[place.cells(waits.later_slice, shift=+1)]
    return result


def identities(table: Schedule | Program) -> NDArray[np.int32]:
    """[num_rows] a number for each (stage, microbatch, slice), and `num_identities` for what is out of range."""
    result = np.empty(len(table.stage), np.int32)
    sizes = (table.num_stages, table.num_microbatches, table.num_slices)
    for part in blocks(len(result)):
        identity = np.zeros(part.stop - part.start, np.int64)
        is_inside = np.ones(len(identity), np.bool_)
        for column, size in zip((table.stage[part], table.microbatch[part], table.slice[part]), sizes, strict=True):
            identity = identity * size + column
            is_inside &= (column >= 0) & (column < size)
        result[part] = np.where(is_inside, identity, num_identities(table))
    return result


def num_identities(table: Schedule | Program) -> int:
    """Return how many (stage, microbatch, slice) there are."""
    return table.num_stages * table.num_microbatches * table.num_slices


class _Places:
    """Where the rows of a table have their cells in an index of its rows."""

    def __init__(self, table: Schedule | Program) -> None:
        self.table = table
        self.op = table.kind if isinstance(table, Schedule) else table.op
        self.num_planes = Plane.WEIGHT + 1 if isinstance(table, Schedule) else len(Plane)
        self.num_rows = len(self.op)
        self.num_stages = table.num_stages
        self.shape = (table.num_stages, table.num_microbatches, table.num_slices)
        self.num_cells = self.num_planes * int(np.prod(self.shape))

    def lookup(self) -> Cells:
        """[num_ops, num_stages] the plane, in stages, and the stage that an operation looks at; none as yet."""
        return np.full((len(Op), self.num_stages), self.num_planes * self.num_stages, np.int64)

    def of(self, part: slice) -> "_Place":
        stage, microbatch, slices = (getattr(self.table, name)[part] for name in ("stage", "microbatch", "slice"))
        key = self.op[part].astype(np.int64) * self.num_stages + stage
        within = microbatch.astype(np.int64) * self.shape[2] + slices
        for column, size in zip((stage, microbatch, slices), self.shape, strict=True):
            if column.min() < 0 or column.max() >= size:
                outside = (column < 0) | (column >= size)
                key[outside], within[outside] = 0, self.num_cells + 1
        return _Place(self, slices, key, within)


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """One block of rows: the entry of a lookup that each row takes, and its cell within a stage of a plane."""

    places: _Places
    slices: NDArray[Any]
    key: Cells
    within: Cells

    def cells(self, lookup: Cells, *, shift: int = 0) -> Cells:
        """[num_rows] the cells that the lookup says, `shift` slices on; the last cell of all for none."""
        _, num_microbatches, num_slices = self.places.shape
        found = lookup.reshape(-1)[self.key]
        found *= num_microbatches * num_slices
        found += self.within
        if shift:
            shifted = self.slices + shift
            found += shift
            found[(shifted < 0) | (shifted >= num_slices)] = self.places.num_cells
        np.minimum(found, self.places.num_cells, out=found)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Waits:
    """Per operation and stage, what a row waits for: the rules of this file's first lines."""

    data: Cells
    receive: Cells
    saved: Cells
    earlier_slice: Cells
    later_slice: Cells

    @classmethod
    def of(cls, table: Schedule | Program, places: _Places) -> "_Waits":
        own = np.arange(table.num_stages)
        previous, following = np.array(table.placement.previous_stage), np.array(table.placement.next_stage)
        waits = cls(*(places.lookup() for _ in range(5)))

        def let(lookup: Cells, op: Op, plane: Plane, stages: NDArray[np.int64]) -> None:
            if plane < places.num_planes:
                lookup[op, stages != NONE] = plane * table.num_stages + stages[stages != NONE]

        let(waits.data, Op.FORWARD, Plane.FORWARD, previous)
        let(waits.receive, Op.FORWARD, Plane.RECEIVE_FORWARD, own)
        let(waits.earlier_slice, Op.FORWARD, Plane.FORWARD, own)
        for backward in (Op.BACKWARD, Op.BACKWARD_INPUT):
            let(waits.data, backward, Plane.BACKWARD, following)
            let(waits.receive, backward, Plane.RECEIVE_BACKWARD, own)
            let(waits.saved, backward, Plane.FORWARD, own)
            let(waits.later_slice, backward, Plane.BACKWARD, own)
        let(waits.data, Op.BACKWARD_WEIGHT, Plane.BACKWARD, own)
        let(waits.data, Op.SEND_FORWARD, Plane.FORWARD, own)
        let(waits.data, Op.SEND_BACKWARD, Plane.BACKWARD, own)
        let(waits.data, Op.RECEIVE_FORWARD, Plane.SEND_FORWARD, previous)
        let(waits.data, Op.RECEIVE_BACKWARD, Plane.SEND_BACKWARD, following)
        return waits


def deciding(before: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return those columns of `predecessors` that decide when a row can start; the first may be all that matters.

    The others, saved activations and other slices, are of the same rank: where they stand earlier, its order is enough.
    """
    for part in blocks(len(before)):
        if (before[part, 1:] >= np.arange(part.start, part.stop)[:, np.newaxis]).any():
            return before
    return before[:, :1].copy()
