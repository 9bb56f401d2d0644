"""All texts of schedules share this: cells such as `2F0` or `3SEND_F1` to columns and back, and what columns tell.

A cell is one action or instruction, or an overlapped pair `(0F7;7B3)OVERLAP_F_B`. This file knows what all tables share
only, so that schedules and programs can offer their texts as methods.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, FormatError, count_of, described, nearest
from penstock.ir.hot import Bools, Int32s
from penstock.ir.operations import IS_COMPUTE, KIND_LETTERS, NAMES_MICROBATCH, OP_OF_TEXT, OPERATIONS, Op
from penstock.ir.table import Ints, Table
from penstock.placement import Placement

Fail = Callable[[str, int, int, int], FormatError]
"""Makes the error for a problem at (rank, cell of that rank, character of that cell), all counted from 0."""

MAX_CELLS = 20_000_000
MAX_NUMBER = 2**31 - 1
MAX_SLICE = 2**15 - 1
PAIR_SUFFIX = "OVERLAP_F_B"
MAX_SHOWN = 60
"""Characters of a refused cell that its message repeats."""

_NAMES = "|".join(sorted(OP_OF_TEXT, key=len, reverse=True))
_CELL = re.compile(rf"([0-9]{{1,10}})({_NAMES})([0-9]{{0,10}})(?:\.([0-9]{{1,10}}))?")
_PAIR = re.compile(rf"\([ \t]*([^;() \t]*)[ \t]*;[ \t]*([^;() \t]*)[ \t]*\){PAIR_SUFFIX}")
_FITTING_START = re.compile(rf"[0-9]{{0,10}}(?:(?<=[0-9])(?:{_NAMES})[0-9]{{0,10}}(?:\.[0-9]{{1,10}})?)?")
_OLD_NAME = re.compile(r"([0-9]+)BW([0-9]+)")
_ANY_NAME = re.compile(r"[0-9]+([A-Z_]+)[0-9]*(?:\.[0-9]+)?")
_EXPECTED = "expected stage, type, microbatch, and .slice if the sequence is cut, such as 2F0, 3SEND_F1 or 2F0.1"

_WITH_MICROBATCH = frozenset(op for op in Op if NAMES_MICROBATCH[op])
_NUMBERED = _WITH_MICROBATCH | {Op.REDUCE_TIED}
_LIMITS = np.array([MAX_NUMBER, MAX_NUMBER, MAX_NUMBER, MAX_SLICE])
_Row = tuple[int, int, int, int]
"""Operation, stage, microbatch (or tied group), slice."""


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Parsed cells of all ranks as columns, rank after rank."""

    op: Ints
    stage: Ints
    number: Ints
    """The microbatch; of `REDUCE_TIED` the tied group."""
    slice: Ints
    joined: Bools
    offsets: Ints

    @property
    def num_ranks(self) -> int:
        return len(self.offsets) - 1

    def actions(self, fail: Fail, problem: str) -> dict[str, Any]:
        """Return the columns of a schedule. Raises: FormatError, for the first row that is no action."""
        rows = np.flatnonzero(~IS_COMPUTE[self.op])
        if len(rows):
            raise fail(problem, *self.place(int(rows[0])))
        return self.columns()

    def columns(self) -> dict[str, Any]:
        """Return the columns by the names that they have in every table."""
        microbatch = np.where(self.op == Op.REDUCE_TIED, 0, self.number).astype(self.number.dtype)
        columns = {name: getattr(self, name) for name in ("op", "stage", "slice", "joined", "offsets")}
        return {**columns, "microbatch": microbatch}

    def place(self, row: int) -> tuple[int, int, int]:
        """Return (rank, cell, 0) of a row, as `Fail` takes it."""
        rank = int(np.searchsorted(self.offsets, row, side="right")) - 1
        begin = int(self.offsets[rank])
        return rank, row - begin - int(self.joined[begin:row].sum()), 0


def cells_of(table: Table) -> list[list[str]]:
    """Return the cells of every rank."""
    texts = [
        f"{stage}{OPERATIONS[Op(code)].text}{value if code in _NUMBERED else ''}"
        + (f".{slice_number}" if slice_number else "")
        for code, stage, value, slice_number in zip(
            table.op.tolist(), table.stage.tolist(), table.number.tolist(), table.slice.tolist(), strict=True
        )
    ]
    for first in np.flatnonzero(table.joined).tolist():
        if texts[first]:
            texts[first] = f"({texts[first]};{texts[first + 1]}){PAIR_SUFFIX}"
        texts[first + 1] = ""  # it has no cell of its own
    return [[text for text in texts[rows] if text] for rows in table.ranks]


def cannot_express(format_name: str, problem: str, expected: str) -> ConfigError:
    """Return the error for a schedule that a format has no words for."""
    problem = f"{format_name} cannot express this order: {problem}; expected {expected}. CSV and JSON can"
    return ConfigError(problem, key="format")


def describe_placement(table: Table) -> str:
    stages, ranks = count_of(table.num_stages, "stage"), count_of(table.num_ranks, "rank")
    return f"it has {stages} on {ranks} ({table.placement.style})"


def require_whole_actions(table: Table, format_name: str) -> None:
    """Refuse slices, and actions other than F and B one after the other. Raises: ConfigError."""
    if table.num_slices > 1:
        problem = f"its microbatches are cut into {table.num_slices} slices"
        raise cannot_express(format_name, problem, "whole microbatches")
    if table.joined.any() or set(table.ops) - {Op.FORWARD, Op.BACKWARD}:
        problem = "it splits backwards, runs forwards again or overlaps actions"
        raise cannot_express(format_name, problem, "F and whole B, one after the other")


def require_text(text: object) -> None:
    """Refuse what is no text at all. Raises: ConfigError, with what was given instead."""
    if not isinstance(text, str):
        raise ConfigError(f"{described(text)}; expected a text, as Path.read_text gives it", key="text")


def parse_cells(ranks: Iterable[Sequence[str]], fail: Fail) -> Cells:
    """Read the cells of every rank, such as `2F0` (stage 2, forward, microbatch 0), into columns of numbers.

    A cell is an action, an instruction or a pair of overlapped actions, without blanks around it. Rows of all ranks
    stand one after another in the columns; `offsets` [num_ranks + 1] says where each rank begins. `number` is the
    microbatch or, of a tied reduction, the group. `fail(problem, rank, cell, character)` makes the error for a place.

    Raises:
        FormatError: made by `fail`, for a cell that is no action, instruction or pair, and for too large numbers.
    """
    rows_by_rank: list[Int32s] = []
    joined: list[Bools] = []
    num_rows = 0
    for rank, cells in enumerate(ranks):
        num_rows += len(cells)
        if num_rows > MAX_CELLS:
            raise fail(f"the text has more than {MAX_CELLS} cells; expected at most as many", rank, 0, 0)
        rows_of_rank, joined_of_rank = _parse_rank(cells, rank, fail)
        rows_by_rank.append(rows_of_rank)
        joined.append(joined_of_rank)
    offsets = np.cumsum([0, *map(len, rows_by_rank)])
    rows = np.concatenate([np.zeros((0, 4), np.int32), *rows_by_rank])
    return Cells(
        op=rows[:, 0].astype(np.int8),
        stage=rows[:, 1].copy(),
        number=rows[:, 2].copy(),
        slice=rows[:, 3].astype(np.int16),
        joined=np.concatenate([np.zeros(0, np.bool_), *joined]),
        offsets=offsets,
    )


def _parse_rank(cells: Sequence[str], rank: int, fail: Fail) -> tuple[Int32s, Bools]:
    """[num_rows, 4] the rows of one rank, and which of them are the first of a pair."""
    rows: list[_Row] = []
    firsts: list[int] = []
    for index, cell in enumerate(cells):
        try:
            match = _CELL.fullmatch(cell)
            if match is None:
                firsts.append(len(rows))
                rows += _parse_pair(cell)
            else:
                rows.append(_row(match))
        except FormatError as error:
            raise fail(error.problem, rank, index, error.column - 1) from None
    joined = np.zeros(len(rows), np.bool_)
    joined[firsts] = True
    numbers = np.array(rows, np.int64).reshape(len(rows), 4)
    too_large = np.flatnonzero((numbers > _LIMITS).any(axis=1))
    if len(too_large):
        row = int(too_large[0])
        problem = f"a number in it is too large; expected at most {MAX_NUMBER}, and {MAX_SLICE} for a slice"
        raise fail(problem, rank, row - int(joined[:row].sum()), 0)
    return numbers.astype(np.int32), joined


def _row(match: re.Match[str]) -> _Row:
    cell, (stage, name, number, slice_number) = match.group(), match.groups()
    op = OP_OF_TEXT[name]
    is_numbered = op in _NUMBERED
    if is_numbered and not number:
        number_name = "tied group" if op is Op.REDUCE_TIED else "microbatch"
        raise FormatError(
            f"{cell!r} ends without its {number_name}; expected such as {stage}{name}0", column=match.end(2) + 1
        )
    if number and not is_numbered:
        raise FormatError(f"{cell!r} has a microbatch; expected {stage}{name} alone", column=match.start(3) + 1)
    if slice_number and op not in _WITH_MICROBATCH:
        raise FormatError(f"{cell!r} has a slice; expected none after {name}", column=match.start(4))
    return int(op), int(stage), int(number or 0), int(slice_number or 0)


def _parse_pair(cell: str) -> list[_Row]:
    """The two rows of a pair; the cell is known to be no single action, so whatever else it is gets refused here."""
    pair = _PAIR.fullmatch(cell)
    if pair is None:
        raise _misfit(cell)
    rows = []
    for group in (1, 2):
        single = _CELL.fullmatch(pair[group])
        if single is None:
            raise _misfit(pair[group], pair.start(group))
        rows.append(_row(single))
        if not IS_COMPUTE[rows[-1][0]]:
            problem = f"{pair[group]!r} cannot overlap; expected {KIND_LETTERS} in a pair"
            raise FormatError(problem, column=pair.start(group) + 1)
    return rows


def _misfit(cell: str, begin: int = 0) -> FormatError:
    """Why a cell is no action, with the column of its first character that does not fit; `begin` is where it starts."""
    shown = repr(cell if len(cell) <= MAX_SHOWN else f"{cell[:MAX_SHOWN]}...")
    fitting = _FITTING_START.match(cell)
    column = begin + (fitting.end() if fitting else 0) + 1
    old, name = _OLD_NAME.fullmatch(cell), _ANY_NAME.fullmatch(cell)
    if "\0" in cell:
        problem = "holds a NUL byte; expected plain text"
    elif cell.startswith("("):
        problem = f"is not an overlapped pair; expected (A;B){PAIR_SUFFIX} with two actions and no nesting"
    elif cell.startswith("#"):
        problem = "is a comment; expected actions alone. CSV has no comments, a drawing has lines that begin with #"
    elif cell.endswith(","):
        problem = "ends in a comma; expected blanks between actions, or CSV without labels"
    elif old is not None:
        problem = f"has the old name BW of the whole backward; expected {old[1]}B{old[2]}"
    elif name is not None and name[1] in OP_OF_TEXT:
        problem = f"has too large a number; expected at most {MAX_NUMBER}"
    else:
        problem = f"is not an action; {_EXPECTED}" + (nearest(name[1], OP_OF_TEXT) if name else "")
    return FormatError(f"{shown} {problem}", column=column)


def infer_layout(cells: Cells, fail: Fail) -> dict[str, Any]:
    """Return what a text without metadata implies: placement, numbers of microbatches and slices, and routes.

    The numbers are 1 + the largest that a cell names. The keys are the fields of a `Table`, and `route_of_microbatch`
    says by which way through the stages each microbatch goes. The placement is a line, a loop, a V or waves where it
    matches, else explicit, with one route through all stages. It is bidirectional, with two routes, where stage k lives
    on rank k and stage p + k on rank p - 1 - k (as in a V), p > 1, and no microbatch visits both halves.

    Raises:
        FormatError: for a rank without actions, a stage on two ranks, a gap in the stages, and numbers far beyond the
            number of actions.
    """
    for rank in np.flatnonzero(np.diff(cells.offsets) == 0).tolist():
        raise fail(f"rank {rank} has no actions; expected at least one on every rank", rank, 0, 0)
    rank_of_stage = _rank_of_stage(cells, fail)
    rows_with_microbatch = np.flatnonzero(NAMES_MICROBATCH[cells.op])
    if not len(rows_with_microbatch):
        raise fail("no action names a microbatch; expected at least one such as 0F0", 0, 0, 0)
    largest = int(rows_with_microbatch[np.argmax(cells.number[rows_with_microbatch])])
    num_microbatches = int(cells.number[largest]) + 1
    num_slices = int(cells.slice.max()) + 1
    if problem := too_sparse(len(cells.op), len(rank_of_stage), num_microbatches, num_slices):
        raise fail(problem, *cells.place(largest))
    placement, route_of_microbatch = _match_placement(cells, rank_of_stage, rows_with_microbatch, num_microbatches)
    return {
        "placement": placement,
        "num_microbatches": num_microbatches,
        "num_slices": num_slices,
        "route_of_microbatch": route_of_microbatch,
    }


def too_sparse(num_rows: int, num_stages: int, num_microbatches: int, num_slices: int) -> str:
    """Return what is wrong with sizes far beyond the number of rows, which a proof needs memory for, or nothing."""
    if num_stages * num_microbatches * num_slices <= max(1_000_000, 4 * num_rows):
        return ""
    return (
        f"{num_stages} stages x {num_microbatches} microbatches x {num_slices} slices are far more than the "
        f"{num_rows} actions there are; number stages, microbatches and slices from 0 without gaps"
    )


def _rank_of_stage(cells: Cells, fail: Fail) -> tuple[int, ...]:
    ranks = np.repeat(np.arange(cells.num_ranks), np.diff(cells.offsets))
    stages, first, index = np.unique(cells.stage, return_index=True, return_inverse=True)
    if int(stages[-1]) != len(stages) - 1:
        missing = int(np.flatnonzero(stages != np.arange(len(stages)))[0])
        raise fail(
            f"stage {stages[-1]} is here, but stage {missing} is on no rank; expected stages 0, 1, ... without gaps",
            *cells.place(int(first[-1])),
        )
    misplaced = np.flatnonzero(ranks[first][index] != ranks)
    if len(misplaced):
        row = int(misplaced[0])
        first_rank = int(ranks[first][index[row]])
        raise fail(
            f"stage {cells.stage[row]} is on rank {first_rank} and on rank {ranks[row]}; expected every stage on one "
            "rank",
            *cells.place(row),
        )
    return tuple(ranks[first].tolist())


def _match_placement(
    cells: Cells, rank_of_stage: tuple[int, ...], rows_with_microbatch: NDArray[np.intp], num_microbatches: int
) -> tuple[Placement, Ints]:
    num_ranks, num_stages = cells.num_ranks, len(rank_of_stage)
    routes: Ints = np.zeros(num_microbatches, np.int8)
    line, vee = Placement.line(num_ranks), Placement.vee(num_ranks)
    if num_ranks > 1 and rank_of_stage == vee.rank_of_stage:
        second_half = cells.stage[rows_with_microbatch] >= num_ranks
        second_half_microbatches = np.unique(cells.number[rows_with_microbatch][second_half])
        if not np.isin(second_half_microbatches, cells.number[rows_with_microbatch][~second_half]).any():
            routes[second_half_microbatches] = 1
            return Placement.bidirectional(num_ranks), routes
    for candidate in (line, Placement.loop(num_ranks, num_stages), vee, Placement.wave(num_ranks, num_stages)):
        if rank_of_stage == candidate.rank_of_stage:
            return candidate, routes
    return Placement.explicit(rank_of_stage), routes
