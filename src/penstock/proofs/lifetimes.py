"""Proof: what a row reads is alive, what it makes is not there yet, and at the end nothing is left.

    0UNSHARD 0F0 0RESHARD 0B0      0B0 reads the weights of stage 0, which 0RESHARD has freed

It reads columns of `ir.operations` alone, and names no operation. A value of a microbatch is made once and read once:
on the rank of its stage, or as a message on that of a neighbor. The weights of a unit and their gradient may stay. The
gradient may be made again while it is alive; weights may not, so nothing is gathered twice. Where no row gathers the
weights of a stage, they are there from the start.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, product

import numpy as np

from penstock.ir.deps import NONE, SLICE_SHIFT, identities, stages_at
from penstock.ir.hot import Bools, Int64s
from penstock.ir.keeps import keeps
from penstock.ir.operations import KEPT, MAKES_KEPT, MESSAGES, OF_STAGE, OPERATIONS, At, Lane, Value
from penstock.ir.program import Program
from penstock.ir.whole import is_sharded
from penstock.proofs.report import Subject

READ, FREE, MAKE = range(3)
"""In the order in which the rows of a pair, which run together, do it."""
_READER_AT = {At.OWN: At.OWN, At.UPSTREAM: At.DOWNSTREAM, At.DOWNSTREAM: At.UPSTREAM}
_READER_AT |= {At.EARLIER_SLICE: At.LATER_SLICE, At.LATER_SLICE: At.EARLIER_SLICE}
_READ_AT = {read.value: read.at for row in OPERATIONS.values() if row.lane is Lane.COMPUTE for read in row.reads}
_READ_AT |= {value: At.OWN for value in Value if value not in _READ_AT}


@dataclass(frozen=True, slots=True, eq=False)
class _Events:
    """The events of the values of one kind: a column entry per event."""

    cell: Int64s
    """Which value: the number of its stage, or the unit's first, or of its (stage, microbatch, slice)."""
    row: Int64s
    what: Int64s
    """`READ`, `FREE` or `MAKE`."""

    @classmethod
    def of(cls, found: list[tuple[int, Int64s, Int64s]]) -> "_Events":
        """Put events together, each given as what happens, the rows, and the cells."""
        columns = ((np.full(len(rows), kind), rows, cells) for kind, rows, cells in found)
        what, row, cell = zip(*columns, strict=True)
        return cls(np.concatenate(cell), np.concatenate(row), np.concatenate(what))

    def are_pairs(self, first_row: Int64s) -> bool:
        """Whether each value is made once and then freed once; a look that needs no sorting, for most are right."""
        made, is_make = np.full(int(self.cell.max()) + 1, NONE, np.int64), self.what == MAKE
        made[self.cell[is_make]] = self.row[is_make]
        freed, begin = self.cell[self.what == FREE], first_row[self.row[self.what == FREE]]
        num_values = np.count_nonzero(made != NONE)
        is_early = (made[freed] == NONE) | (made[freed] >= begin)
        made[freed] = NONE
        is_whole = len(self.what) == 2 * num_values == 2 * len(freed)
        return is_whole and not is_early.any() and bool((made == NONE).all())

    def sorted(self, first_row: Int64s) -> "_Events":
        """Return them by value and time."""
        time = first_row[self.row] * 3 + self.what
        order = np.lexsort((time, self.cell))
        return _Events(self.cell[order], self.row[order], self.what[order])


def check_lifetimes(subject: Subject) -> None:
    """Prove it of a program whose rows and messages are whole."""
    program = subject.program
    values = _Values(program)
    first_row = np.arange(program.num_rows) - np.append(False, program.joined[:-1])  # a pair is at one time
    for value, has_arrived in chain(product(Value, [False]), product(filter(MESSAGES.get, Value), [True])):
        found = list(values.events(value, has_arrived))
        if not any(kind != READ and len(rows) for kind, rows, _ in found):
            continue
        events = _Events.of(found)
        if value in OF_STAGE or not events.are_pairs(first_row):
            _check(subject, events.sorted(first_row), value)


class _Values:
    """Finds the rows that read, free and make a value, and which one each means."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._rows = {op: np.flatnonzero(program.op == op) for op in program.ops}
        self._identity = identities(program).astype(np.int64)
        self._keeps = keeps(program)
        self._rank_of_stage = np.array(program.placement.rank_of_stage)
        self._unit = np.where(is_sharded(program), program.unit_of_stage, np.arange(program.num_stages))

    def events(self, value: Value, has_arrived: bool) -> Iterator[tuple[int, Int64s, Int64s]]:
        """Yield what happens, the rows, and the cells; `has_arrived` are messages, as they are where they came to."""
        for op, rows in self._rows.items():
            row = OPERATIONS[op]
            if MAKES_KEPT[op] and value in KEPT:
                rows = rows[self._keeps[rows] == value]
            if row.lane is Lane.RECEIVE:
                if has_arrived and row.message is value:
                    yield MAKE, rows, self._identity[rows]
                continue
            for read in row.reads:
                if read.value is value:
                    yield FREE if value in row.frees else READ, *self._read(rows, value, read.at, has_arrived)
            if value in row.makes and not has_arrived:
                yield MAKE, *self._made(rows, value)

    def _read(self, rows: Int64s, value: Value, at: At, has_arrived: bool) -> tuple[Int64s, Int64s]:
        program = self._program
        stage = program.stage[rows]
        neighbor = stages_at(program.placement, at)[stage]
        has_message = value in MESSAGES and at is not At.OWN
        is_there = self._is_inside(rows, at)
        if has_message:
            is_there &= (self._rank_of_stage[neighbor] != self._rank_of_stage[stage]) == has_arrived
        elif has_arrived:
            is_there &= False
        rows, stage, neighbor = rows[is_there], stage[is_there], neighbor[is_there]
        if value in OF_STAGE:
            return rows, self._unit[stage]
        if has_arrived:
            return rows, self._identity[rows]
        per_stage = program.num_microbatches * program.num_slices
        return rows, self._identity[rows] + (neighbor - stage) * per_stage + SLICE_SHIFT.get(at, 0)

    def _made(self, rows: Int64s, value: Value) -> tuple[Int64s, Int64s]:
        """Where a route or a sequence ends, nobody reads the value, and none is made."""
        rows = rows[self._is_inside(rows, _READER_AT[_READ_AT[value]])]
        return rows, self._unit[self._program.stage[rows]] if value in OF_STAGE else self._identity[rows]

    def _is_inside(self, rows: Int64s, at: At) -> Bools:
        """Whether there is a stage or a slice at the other end."""
        program = self._program
        part = program.slice[rows] + SLICE_SHIFT.get(at, 0)
        is_inside: Bools = (part >= 0) & (part < program.num_slices)
        is_inside &= stages_at(program.placement, at)[program.stage[rows]] != NONE
        return is_inside


def _check(subject: Subject, events: _Events, value: Value) -> None:
    """Go through the events of one kind of value, all at once."""
    cell, what, number = events.cell, events.what, np.arange(len(events.cell))
    is_first = np.append(True, cell[1:] != cell[:-1])
    begin = np.maximum.accumulate(np.where(is_first, number, 0))
    # The last event before each one that made or freed the value; one of another value means that there is none.
    latest = np.append(-1, np.maximum.accumulate(np.where(what != READ, number, -1))[:-1])
    has_latest = latest >= begin
    is_alive = np.where(has_latest, what[latest] == MAKE, False)
    if value in OF_STAGE:
        made = np.zeros(int(cell.max()) + 1, np.bool_)
        made[cell[what == MAKE]] = True
        is_alive |= ~has_latest & ~made[cell]
    for index in np.flatnonzero((what != MAKE) & ~is_alive).tolist():
        row, name = int(events.row[index]), _name(subject, events, index, value)
        freed = subject.place(int(events.row[latest[index]]), seen_from=row) if has_latest[index] else ""
        problem = f"{freed} has freed before" if freed else "no row before it makes"
        subject.add(row, f"reads {name}, which {problem}", f"Move it before {freed}" if freed else "Add what makes it")
    if value is Value.GRADIENT:
        return
    for index in np.flatnonzero((what == MAKE) & is_alive).tolist():
        row, name = int(events.row[index]), _name(subject, events, index, value)
        maker = subject.place(int(events.row[latest[index]]), seen_from=row)
        end = "dropped since" if value is Value.WEIGHTS else "used"
        subject.add(row, f"makes {name}, which {maker} has made, and nothing has {end}", "Drop one of the two")
    if value is Value.WEIGHTS:
        return
    is_last = np.append(is_first[1:], True)
    for index in np.flatnonzero(is_last & (what == MAKE)).tolist():
        row, name = int(events.row[index]), _name(subject, events, index, value)
        subject.add(row, f"makes {name}, which nothing uses", "Add what uses it, or drop it")


def _name(subject: Subject, events: _Events, index: int, value: Value) -> str:
    """Name the value of an event."""
    text, table = value.name.lower().replace("_", " "), subject.table
    if value in OF_STAGE:
        return f"the {text} of stage {events.cell[index]}"
    rest, part = divmod(int(events.cell[index]), table.num_slices)
    stage, microbatch = divmod(rest, table.num_microbatches)
    of_slice = f", slice {part}" if table.num_slices > 1 else ""
    return f"the {text} of stage {stage}, microbatch {microbatch}{of_slice}"
