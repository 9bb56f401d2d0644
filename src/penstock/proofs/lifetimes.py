"""Proof: what a row reads is alive, what it makes is not there yet, and at the end nothing is left.

    0UNSHARD 0F0 0RESHARD 0B0      0B0 reads the weights of stage 0, which 0RESHARD has freed

It reads columns of `ir.operations` alone, and names no operation. A value of a microbatch is made once and read once:
on the rank of its stage, or as a message on that of a neighbor. The weights of a unit and their gradient may stay. The
gradient may be made again while it is alive; weights may not, so nothing is gathered twice. Where no row gathers the
weights of a stage, they are there from the start; so are data in a program that loads none.

Of a small table, all that happens to the values of a kind is sorted by value and time. A large table is first walked by
a compiled loop that needs a byte per value. Only the kinds of values that it finds wrong are sorted, for the messages.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from penstock.ir.deps import NONE, SLICE_SHIFT, num_identities, stages_at
from penstock.ir.hot import Hot, Int64s, frozen, is_large
from penstock.ir.keeps import NOTHING, keeps
from penstock.ir.operations import KEPT, MAKES_KEPT, MESSAGES, NUM_OPS, OF_STAGE, OPERATIONS, At, Lane, Op, Value
from penstock.ir.program import Program
from penstock.ir.whole import is_sharded
from penstock.proofs.report import Subject

READ, FREE, MAKE = EFFECTS = (0, 1, 2)
"""The effects of a row on a value, in the order in which the two rows of a pair have them: both read before both free.
"""
_READER_AT = {At.OWN: At.OWN, At.BATCH: At.BATCH, At.UPSTREAM: At.DOWNSTREAM, At.DOWNSTREAM: At.UPSTREAM}
_READER_AT |= {At.EARLIER_SLICE: At.LATER_SLICE, At.LATER_SLICE: At.EARLIER_SLICE}
_READ_AT = {read.value: read.at for row in OPERATIONS.values() if row.lane is Lane.COMPUTE for read in row.reads}
_READ_AT |= {value: At.OWN for value in Value if value not in _READ_AT}


class _Kind(NamedTuple):
    """Values with a table of cells of their own: a cell per stage, or per (stage, microbatch, slice)."""

    value: Value
    has_arrived: bool
    """Whether they are messages on the rank that received them, which count apart from those on the rank that sends."""


KINDS = [_Kind(value, False) for value in Value] + [_Kind(value, True) for value in Value if value in MESSAGES]
"""The kinds of values, in the order in which violations are reported."""
_DATA = _Kind(Value.DATA, False)


@dataclass(frozen=True, slots=True, eq=False)
class _Access:
    """An effect that rows of one operation have on a value, those rows alone that meet all conditions below."""

    op: Op
    kind: _Kind
    effect: int
    """`READ`, `FREE` or `MAKE`."""
    first_cell: Int64s
    """[num_stages] the cell of the value, by the row's stage, if the row has microbatch 0 and slice 0; `NONE` where a
    row of the stage has no effect."""
    slice_shift: int
    """The slice of the value minus the slice of the row."""
    end_shift: int
    """The slice of the value's other user, its maker or reader, minus the slice of the row. A row has no effect where
    there is no such slice."""

    @property
    def kept_value(self) -> int:
        """The value that `ir.keeps` must name for the row, or `NOTHING` where that does not matter."""
        return int(self.kind.value) if self.kind.value in KEPT and MAKES_KEPT[self.op] else NOTHING


@dataclass(frozen=True, slots=True, eq=False)
class _Events:
    """The effects of all rows on the values of one kind, sorted by value and time: a column entry per effect."""

    cell: Int64s
    row: Int64s
    effect: Int64s


def check_lifetimes(subject: Subject) -> None:
    """Prove of a program whose rows and messages are complete that its values live as the operations say."""
    lifetimes = _Lifetimes(subject.program)
    # Interpreted, the walk takes ten times as long as sorting: a small table is sorted at once.
    kinds = lifetimes.wrong_kinds() if is_large(subject.program.num_rows) else list(lifetimes.accesses_by_kind)
    for kind in kinds:
        events = lifetimes.events(kind)
        if (events.effect != READ).any():
            _report(subject, events, kind.value)


class _Lifetimes:
    """Finds which rows read, free and make which values."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._kept_values = frozen(keeps(program))
        self._rank_of_stage = np.array(program.placement.rank_of_stage)
        self._unit = np.where(is_sharded(program), program.unit_of_stage, np.arange(program.num_stages))

    @cached_property
    def accesses_by_kind(self) -> dict[_Kind, list[_Access]]:
        """The accesses of each kind of values that some row frees or makes, by ascending operation.

        Data that no row loads come from outside, so nothing is known of when they are there.
        """
        num_slices = self._program.num_slices
        accesses = [
            access
            for op in self._program.ops
            for access in self._accesses(op)
            if (access.first_cell != NONE).any() and abs(access.end_shift) < num_slices
        ]
        of_kind = {kind: [access for access in accesses if access.kind == kind] for kind in KINDS}
        if all(access.effect != MAKE for access in of_kind[_DATA]):
            del of_kind[_DATA]
        return {kind: group for kind, group in of_kind.items() if any(access.effect != READ for access in group)}

    def events(self, kind: _Kind) -> _Events:
        """Find the rows that touch values of a kind, and sort what they do by value and time."""
        program = self._program
        columns = [(rows, cells, np.full(len(rows), effect)) for rows, cells, effect in self._touched(kind)]
        row, cell, effect = (np.concatenate(column) for column in zip(*columns, strict=True))
        first_row = row - np.append(False, program.joined[:-1])[row]  # a pair is at one time
        order = np.lexsort((first_row * len(EFFECTS) + effect, cell))
        return _Events(cell[order], row[order], effect[order])

    def wrong_kinds(self) -> list[_Kind]:
        """Walk all rows by a compiled loop; return the kinds of values of which some are used wrongly."""
        program, size = self._program, num_identities(self._program)
        kinds = list(self.accesses_by_kind)
        is_alive = np.zeros((len(kinds), size), np.bool_)
        for number, kind in enumerate(kinds):
            is_alive[number] = kind.value in OF_STAGE  # from the start, until the walk meets a row that makes it
        is_wrong = np.zeros(len(kinds), np.bool_)
        columns = (program.op, program.stage, program.microbatch, program.slice, program.joined, self._kept_values)
        _WALK(program.num_rows, _Rows(*columns, program.num_slices), self._table(), is_alive, is_wrong)
        for number, kind in enumerate(kinds):
            is_wrong[number] |= kind.value not in OF_STAGE and is_alive[number].any()  # nothing uses it
        return [kind for kind, has_error in zip(kinds, is_wrong.tolist(), strict=True) if has_error]

    def _accesses(self, op: Op) -> Iterator[_Access]:
        """Yield the effects of an operation, of all kinds of values."""
        row = OPERATIONS[op]
        if row.lane is Lane.RECEIVE:
            assert row.message is not None
            yield self._access(op, _Kind(row.message, True), MAKE)
            return
        for read in row.reads:
            effect = FREE if read.value in row.frees else READ
            yield self._access(op, _Kind(read.value, False), effect, read.at)
            if read.value in MESSAGES and read.at is not At.OWN:
                yield self._access(op, _Kind(read.value, True), effect, read.at)
        for value in row.makes:
            yield self._access(op, _Kind(value, False), MAKE, _READER_AT[_READ_AT[value]])

    def _access(self, op: Op, kind: _Kind, effect: int, end_at: At = At.OWN) -> _Access:
        """Return an effect on the values of a kind; at the other end is who makes what is read, or reads what is made.

        Where a route or a sequence ends, nobody reads the value, and none is made.
        """
        program, stages = self._program, np.arange(self._program.num_stages)
        end = stages_at(program.placement, end_at)
        stage = stages if effect == MAKE or kind.has_arrived else end
        is_there = end != NONE
        if effect != MAKE and kind.value in MESSAGES and end_at is not At.OWN:
            # A value that was made on another rank has arrived as a message, and that has the number of its reader.
            is_there &= (self._rank_of_stage[end] != self._rank_of_stage) == kind.has_arrived
        cell = self._unit if kind.value in OF_STAGE else stage * (num_identities(program) // program.num_stages)
        shift = SLICE_SHIFT.get(end_at, 0)
        return _Access(op, kind, effect, np.where(is_there, cell, NONE), 0 if effect == MAKE else shift, shift)

    def _touched(self, kind: _Kind) -> Iterator[tuple[Int64s, Int64s, int]]:
        """Yield the rows that touch values of a kind, the cells of these, and the effect."""
        program = self._program
        for access in self.accesses_by_kind[kind]:
            rows = np.flatnonzero(program.op == access.op)
            cells = access.first_cell[program.stage[rows]]
            end_slice = program.slice[rows] + access.end_shift
            is_touched = (cells != NONE) & (end_slice >= 0) & (end_slice < program.num_slices)
            if access.kept_value != NOTHING:
                is_touched &= self._kept_values[rows] == access.kept_value
            rows, cells = rows[is_touched], cells[is_touched]
            if kind.value not in OF_STAGE:
                offset = program.microbatch[rows].astype(np.int64) * program.num_slices + program.slice[rows]
                cells += offset + access.slice_shift
            yield rows, cells, access.effect

    def _table(self) -> "_Accesses":
        """Return the accesses of all kinds as columns, by operation and effect."""
        numbers = {kind: number for number, kind in enumerate(self.accesses_by_kind)}
        accesses = [access for group in self.accesses_by_kind.values() for access in group]
        accesses.sort(key=lambda access: (access.op, access.effect))
        order = [access.op * len(EFFECTS) + access.effect for access in accesses]
        return _Accesses(
            begin=np.searchsorted(order, np.arange(NUM_OPS * len(EFFECTS) + 1)),
            kind=np.array([numbers[access.kind] for access in accesses]),
            is_of_stage=np.array([access.kind.value in OF_STAGE for access in accesses], np.bool_),
            may_be_remade=np.array([access.kind.value is Value.GRADIENT for access in accesses], np.bool_),
            kept_value=np.array([access.kept_value for access in accesses]),
            slice_shift=np.array([access.slice_shift for access in accesses]),
            end_shift=np.array([access.end_shift for access in accesses]),
            first_cell=np.array([access.first_cell for access in accesses]),
        )


class _Rows(NamedTuple):
    """Columns of the program, as the walk reads them."""

    op: Any
    stage: Any
    microbatch: Any
    slice: Any
    joined: Any
    kept_value: Any
    num_slices: int


class _Accesses(NamedTuple):
    """The fields of `_Access`, an entry per access, sorted by operation and effect."""

    begin: Any
    """[3 * NUM_OPS + 1] by operation and effect, the first access; the next entry is their end."""
    kind: Any
    is_of_stage: Any
    may_be_remade: Any
    kept_value: Any
    slice_shift: Any
    end_shift: Any
    first_cell: Any


def _cell_of(row: int, access: int, rows: _Rows, accesses: _Accesses) -> Any:
    """Return the cell of the value that a row touches, or NONE if this row does not have the effect."""
    cell = accesses.first_cell[access, rows.stage[row]]
    end_slice = rows.slice[row] + accesses.end_shift[access]
    if cell == NONE or end_slice < 0 or end_slice >= rows.num_slices:
        return NONE
    if accesses.kept_value[access] != NOTHING and accesses.kept_value[access] != rows.kept_value[row]:
        return NONE
    if accesses.is_of_stage[access]:
        return cell
    return cell + rows.microbatch[row] * rows.num_slices + rows.slice[row] + accesses.slice_shift[access]


def _apply(row: int, effect: int, rows: _Rows, accesses: _Accesses, is_alive: Any, is_wrong: Any) -> None:
    """Read, free or make the values of one row."""
    group = rows.op[row] * len(EFFECTS) + effect
    for access in range(accesses.begin[group], accesses.begin[group + 1]):
        cell = _cell_of(row, access, rows, accesses)
        if cell == NONE:
            continue
        kind = accesses.kind[access]
        # Of a value, reading and freeing need that it is alive, and making that it is not.
        if is_alive[kind, cell] == (effect == MAKE) and not (effect == MAKE and accesses.may_be_remade[access]):
            is_wrong[kind] = True
        if effect != READ:
            is_alive[kind, cell] = effect == MAKE


def _walk_rows(rows: _Rows, accesses: _Accesses, is_alive: Any, is_wrong: Any) -> None:
    """Follow each value through all rows; `is_alive` [num_kinds, num_cells] starts with True for values of stages."""
    num_rows = len(rows.op)
    for row in range(num_rows):
        # A value of a stage is not there from the start if some row makes it, however late.
        group = rows.op[row] * len(EFFECTS) + MAKE
        for access in range(accesses.begin[group], accesses.begin[group + 1]):
            if accesses.is_of_stage[access]:
                is_alive[accesses.kind[access], accesses.first_cell[access, rows.stage[row]]] = False
    # All rows that touch a cell are of one rank: a message on the rank that received it has a cell of its own. So the
    # order of the table is that of time, but for the rows of a pair, which run together.
    row = 0
    while row < num_rows:
        last = row + 1 if rows.joined[row] else row
        for effect in EFFECTS:
            for member in range(row, last + 1):
                _apply(member, effect, rows, accesses, is_alive, is_wrong)
        row = last + 1


_WALK = Hot(_walk_rows, _apply, _cell_of)


def _report(subject: Subject, events: _Events, value: Value) -> None:
    """Add a violation for each read of a value that is not there, value made twice, and value that nobody uses.

    `value` is the sort of value (activations, messages, weights and so on), and a cell is the place of one of them: of
    one stage, microbatch and slice. `events` are all its makes, reads and frees, cell after cell in the order in which
    rows run.
    """
    cell, row, index_of_event = events.cell, events.row, np.arange(len(events.cell))
    is_make, is_first = events.effect == MAKE, np.append(True, cell[1:] != cell[:-1])
    first_of_cell = np.maximum.accumulate(np.where(is_first, index_of_event, 0))
    # `latest` is the last make or free before each event. Where that is of an earlier cell, this cell has none yet.
    latest_change = np.maximum.accumulate(np.where(events.effect != READ, index_of_event, NONE))
    latest = np.append(NONE, latest_change[:-1])
    has_latest = latest >= first_of_cell
    is_alive = has_latest & is_make[latest]
    if value in OF_STAGE:
        is_made = np.zeros(int(cell.max()) + 1, np.bool_)
        is_made[cell[is_make]] = True
        is_alive |= ~has_latest & ~is_made[cell]  # a value of a stage that no row makes is there from the start
    # Reads and frees need a value that is alive.
    for index in np.flatnonzero(~is_make & ~is_alive).tolist():
        freer = subject.place(int(row[latest[index]]), seen_from=int(row[index])) if has_latest[index] else ""
        problem = f"{freer} has freed before" if freer else "no row before it makes"
        fix = f"Move it before {freer}" if freer else "Add what makes it"
        subject.add(int(row[index]), f"reads {_value_name(subject, int(cell[index]), value)}, which {problem}", fix)
    # A gradient may be made again, since backwards add to it.
    if value is Value.GRADIENT:
        return
    for index in np.flatnonzero(is_make & is_alive).tolist():
        maker = subject.place(int(row[latest[index]]), seen_from=int(row[index]))
        problem = f"{maker} has made, and nothing has {'dropped since' if value is Value.WEIGHTS else 'used'}"
        name = _value_name(subject, int(cell[index]), value)
        subject.add(int(row[index]), f"makes {name}, which {problem}", "Drop one of the two")
    if value is Value.WEIGHTS:
        return
    is_last = np.append(is_first[1:], True)
    for index in np.flatnonzero(is_last & is_make).tolist():
        name = _value_name(subject, int(cell[index]), value)
        subject.add(int(row[index]), f"makes {name}, which nothing uses", "Add what uses it, or drop it")


def _value_name(subject: Subject, cell: int, value: Value) -> str:
    """Name the value of a cell."""
    text, table = value.name.lower().replace("_", " "), subject.table
    if value in OF_STAGE:
        return f"the {text} of stage {cell}"
    stage_and_microbatch, slice_index = divmod(cell, table.num_slices)
    stage, microbatch = divmod(stage_and_microbatch, table.num_microbatches)
    of_slice = f", slice {slice_index}" if table.num_slices > 1 else ""
    return f"the {text} of stage {stage}, microbatch {microbatch}{of_slice}"
