"""Grids: schedules and programs drawn as text, one line per rank, and read back.

Timed, a column is one unit of time: B takes two, all others one; `.` is an idle unit, `=` a further unit of an action.

    rank 0: 0F0 0F1 .   0B0 =   0B1 =
    rank 1: .   1F0 1B0 =   1F1 1B1 =

Plain, the actions of a rank come one after the other. An overlapped pair is `(0F7;7B3)` in both. A long drawing may
be wrapped into blocks, each with the labels of all ranks; lines that begin with `#` are comments.
"""

import re
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock.errors import FormatError
from penstock.ir.deps import predecessors
from penstock.ir.formats.cells import PAIR_SUFFIX, cells_of, infer_layout, parse_cells
from penstock.ir.linear_extension import walk_untimed
from penstock.ir.operations import OPERATIONS, Kind, Op
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule

IDLE, GOES_ON, CUT, MARK, COMMENT = ".", "=", "...", "^", "#"

_LABEL = re.compile(r"\s*rank\s+([0-9]{1,9})\s*:?(?=[\s|]|$)")
_WORD = re.compile(rf"\([^()|]*\)(?:{PAIR_SUFFIX})?|[^\s|]+")


@dataclass(frozen=True, slots=True)
class _Word:
    """A word of a drawing; lines and columns count from 1."""

    text: str
    line: int
    column: int

    def error(self, problem: str, file: str) -> FormatError:
        return FormatError(problem, file=file, line=self.line, column=self.column)


@dataclass(frozen=True, slots=True)
class _Row:
    """All that a drawing says of one rank, from `line` on; a wrapped one says it in several lines."""

    line: int
    words: list[_Word]


def to_grid(table: Schedule | Program, *, timed: bool = True) -> str:
    """Draw a table, without a newline at the end.

    Schedules are drawn in time unless `timed` is False or the order cannot run; programs are always plain.
    """
    rows = [[cell.removesuffix(PAIR_SUFFIX) for cell in row] for row in cells_of(table)]
    columns = _start_columns(table) if timed and isinstance(table, Schedule) else None
    if columns is not None:
        rows = [_in_time(row, where) for row, where in zip(rows, columns, strict=True)]
    width = max((len(cell) for row in rows for cell in row), default=1)
    label = len(f"rank {table.num_ranks - 1}: ")
    lines = [
        f"rank {rank}:".ljust(label) + " ".join(cell.ljust(width) for cell in row) for rank, row in enumerate(rows)
    ]
    return "\n".join(line.rstrip() for line in lines)


def grid_columns(table: Schedule | Program) -> int:
    """Return how many columns a drawing of the table has: the units of its time, or the rows of its longest rank.

    A drawing has a line per rank, and a cell of some characters in each column; large ones take long to make.
    """
    if isinstance(table, Schedule):
        times = walk_untimed(table, predecessors(table))
        if times.is_complete:
            return int(times.end.max(initial=0))
    return int(np.diff(table.offsets).max(initial=0))


def from_grid(text: str, *, file: str = "<text>", name: str = "from a grid") -> Schedule:
    """Read a drawing of a schedule: one line of actions per rank, with or without a column per unit of time.

    Lines may have labels such as `rank 0:`, and `|` between columns. Where labels begin with rank 0 again, the drawing
    was wrapped, and the rows go on. Empty lines, comments and lines of marks are skipped. Placement and numbers of
    microbatches are inferred from the actions, as for CSV.

    Raises:
        FormatError: with line and column of the first word that does not fit.
    """
    rows = _read_rows(text, file)
    if not rows:
        problem = "the drawing is empty; expected one line of actions per rank, such as 0F0 0B0"
        raise FormatError(problem, file=file)
    for row in rows:
        _require_whole(row, file)
    places = [[word for word in row.words if word.text not in (IDLE, GOES_ON)] for row in rows]

    def fail(problem: str, rank: int, cell: int, offset: int) -> FormatError:
        if cell >= len(places[rank]):
            return FormatError(problem, file=file, line=rows[rank].line)
        word = places[rank][cell]
        return FormatError(problem, file=file, line=word.line, column=word.column + offset)

    cells = parse_cells(([_whole(word.text) for word in words] for words in places), fail)
    layout = infer_layout(cells, fail)
    columns = cells.actions(fail, "a drawing of a program cannot be read; expected actions alone")
    return Schedule(name=name, **layout, **columns)


def _start_columns(schedule: Schedule) -> list[list[int]] | None:
    """Per rank, the start of every cell and the end of the last, in units of time; None if the order cannot run."""
    times = walk_untimed(schedule, predecessors(schedule))
    if not times.is_complete:
        return None
    is_cell = ~np.append(False, schedule.joined)[:-1]
    columns = []
    for rows in schedule.ranks:
        starts = times.start[rows][is_cell[rows]].astype(int).tolist()
        columns.append([*starts, int(times.end[rows].max(initial=0))])
    return columns


def _in_time(cells: list[str], columns: list[int]) -> list[str]:
    """One word per unit of time; the last of `columns` is where the last cell ends."""
    row = [IDLE] * columns[0]
    duration = {kind.letter: OPERATIONS[Op(kind)].units for kind in Kind}
    for cell, (start, following) in zip(cells, pairwise(columns), strict=True):
        length = sum(duration[letter] for letter in cell if letter in duration)
        row += [cell] + [GOES_ON] * (length - 1) + [IDLE] * (following - start - length)
    return row


def _read_rows(text: str, file: str) -> list[_Row]:
    """Return the row of words of each rank, with the place of each word in the text for messages.

    A wrapped drawing has several blocks, each with all ranks in order. The first block makes the rows, and later blocks
    add to them.

    Raises:
        FormatError: a label names another rank than the next one, or a later block has other ranks than the first.
    """
    rows: list[_Row] = []
    rank, num_blocks = -1, 1
    for number, line in enumerate(text.split("\n"), start=1):
        label = _LABEL.match(line)
        matches = _WORD.finditer(line, label.end() if label else 0)
        words = [_Word(word.group(), number, word.start() + 1) for word in matches]
        if label is None and (not words or words[0].text.startswith((MARK, COMMENT))):
            continue
        rank += 1
        if label is not None:
            rank_word = _Word(label[1], number, label.start(1) + 1)
            # Rank 0 after the last rank begins another block of a wrapped drawing.
            if int(label[1]) == 0 and rank == len(rows) > 1:
                rank, num_blocks = 0, num_blocks + 1
            if int(label[1]) != rank:
                problem = f"the label says rank {label[1]}; expected rank {rank}, as ranks come in ascending order"
                raise rank_word.error(problem, file)
        if rank < len(rows):
            rows[rank].words.extend(words)
        elif num_blocks == 1:
            rows.append(_Row(number, words))
        else:
            problem = f"rank {rank} is in no block above; expected {rank} ranks"
            raise FormatError(problem, file=file, line=number)
    if rank < len(rows) - 1:
        problem = f"block {num_blocks} ends with rank {rank}; expected all of the {len(rows)} ranks"
        raise FormatError(problem, file=file, line=text.count("\n") + 1)
    return rows


def _require_whole(row: _Row, file: str) -> None:
    """Refuse a row that is cut off, or in which something goes on that did not begin."""
    previous = IDLE
    for word in row.words:
        if word.text == CUT:
            raise word.error("the drawing is cut off here; expected all of it", file)
        if word.text == GOES_ON and previous == IDLE:
            raise word.error("nothing goes on here; expected an action before =", file)
        previous = word.text


def _whole(word: str) -> str:
    """A pair may be drawn without its name."""
    return word + PAIR_SUFFIX if word.startswith("(") and word.endswith(")") else word
