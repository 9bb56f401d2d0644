"""Grids: schedules and programs drawn as text, one line per rank, and read back.

Timed, a column is one unit of time: F, I and W take one, B two; `.` is an idle unit, `=` a further unit of an action.

    rank 0: 0F0 0F1 .   0B0 =   0B1 =
    rank 1: .   1F0 1B0 =   1F1 1B1 =

Plain, the actions of a rank stand one behind the other. An overlapped pair is `(0F7;7B3)` in both.
"""

import re
from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from penstock.errors import FormatError
from penstock.ir.action import Kind
from penstock.ir.deps import predecessors
from penstock.ir.formats.cells import PAIR_SUFFIX, action_cells, infer_layout, instruction_cells, parse_cells
from penstock.ir.instruction import Op
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.ir.walk import walk

IDLE, GOES_ON, CUT, MARK = ".", "=", "...", "^"
UNITS = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 1}

_LABEL = re.compile(r"\s*rank\s+([0-9]{1,9})\s*:?(?=[\s|]|$)")
_WORD = re.compile(rf"\([^()|]*\)(?:{PAIR_SUFFIX})?|[^\s|]+")
_Words = list[tuple[int, str]]
"""The words of a line, each with where it begins."""


def to_grid(
    table: Schedule | Program,
    marks: Mapping[tuple[int, int], str] | None = None,
    *,
    timed: bool = True,
    window: tuple[int, int] | None = None,
) -> str:
    """Draw a table, without a newline at the end.

    Schedules are drawn in time unless `timed` is False or the order cannot run; programs are always plain. `marks` puts
    `^ text` under cells: (rank, cell of that rank) -> text, where a pair is one cell. `window` (begin, end) restricts
    the columns; `...` shows where something is cut off.
    """
    cells = action_cells(table) if isinstance(table, Schedule) else instruction_cells(table)
    cells = [[cell.removesuffix(PAIR_SUFFIX) for cell in row] for row in cells]
    columns = _start_columns(table) if timed and isinstance(table, Schedule) else None
    if columns is None:
        columns = [list(range(len(row))) for row in cells]
        rows = cells
    else:
        rows = [_in_time(row, where) for row, where in zip(cells, columns, strict=True)]
    begin, end = window or (0, max(map(len, rows)))
    width = max((len(cell) for row in rows for cell in row[begin:end]), default=1)
    label = len(f"rank {table.num_ranks - 1}: ")

    lines = []
    for rank, row in enumerate(rows):
        shown = [CUT.ljust(width)] * (begin > 0) + [cell.ljust(width) for cell in row[begin:end]]
        head = f"rank {rank}:".ljust(label)
        lines.append((head + " ".join(shown + [CUT] * (len(row) > end))).rstrip())
        for position, text in sorted((place[1], text) for place, text in (marks or {}).items() if place[0] == rank):
            column = columns[rank][position] if position < len(columns[rank]) else len(row)
            if begin <= column <= end:
                left = label + (column - begin + (begin > 0)) * (width + 1)
                lines.append(" " * left + f"{MARK} {text}")
    return "\n".join(lines)


def from_grid(text: str, *, file: str = "<text>", name: str = "from a grid") -> Schedule:
    """Read a drawing, timed or plain, with or without `rank 0:` labels and `|` between columns.

    Empty lines and lines of marks are skipped. What the drawing does not say is inferred, as for CSV.

    Raises:
        FormatError: with line and column of the first word that does not fit.
    """
    places: list[tuple[int, _Words]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        words = _read_line(line, number, len(places), file)
        if words is not None:
            places.append((number, words))
    if not places:
        raise FormatError("the drawing is empty; expected one line of actions per rank, such as 0F0 0B0", file=file)

    def fail(problem: str, rank: int, cell: int, offset: int) -> FormatError:
        line, words = places[rank]
        column = words[cell][0] + offset + 1 if cell < len(words) else 1
        return FormatError(problem, file=file, line=line, column=column)

    cells = parse_cells(([_whole(word) for _, word in words] for _, words in places), fail)
    layout = infer_layout(cells, fail)
    if not cells.is_schedule:
        row = int(np.argmax(cells.op > Op.BACKWARD_WEIGHT))
        raise fail("a drawing of a program cannot be read; expected actions alone", *cells.place(row))
    return Schedule(
        name,
        layout.placement,
        layout.num_microbatches,
        layout.num_slices,
        layout.route_of_microbatch,
        cells.op,
        cells.stage,
        cells.microbatch,
        cells.slice,
        cells.joined,
        cells.offsets,
    )


def _start_columns(schedule: Schedule) -> list[list[int]] | None:
    """Per rank, the start of every cell and the end of the last, in units of time; None if the order cannot run."""
    units = np.array([UNITS[kind] for kind in Kind], np.float64)[schedule.kind]
    times = walk(schedule.offsets, predecessors(schedule), schedule.joined, units)
    if not times.is_complete:
        return None
    is_cell = ~np.concatenate([[False], schedule.joined[:-1]]) if schedule.num_actions else schedule.joined
    columns = []
    for rank in range(schedule.num_ranks):
        rows = np.arange(schedule.offsets[rank], schedule.offsets[rank + 1])
        starts = times.start[rows[is_cell[rows]]].astype(int).tolist()
        columns.append([*starts, int(times.end[rows].max(initial=0))])
    return columns


def _in_time(cells: list[str], columns: list[int]) -> list[str]:
    """One word per unit of time; the last of `columns` is where the last cell ends."""
    row = [IDLE] * columns[0]
    duration = {kind.letter: units for kind, units in UNITS.items()}
    for cell, (start, following) in zip(cells, pairwise(columns), strict=True):
        length = sum(duration[letter] for letter in cell if letter in duration)
        row += [cell] + [GOES_ON] * (length - 1) + [IDLE] * (following - start - length)
    return row


def _read_line(line: str, number: int, rank: int, file: str) -> _Words | None:
    """The actions of one line, or None for a line without any place for them."""
    label = _LABEL.match(line)
    if label is not None and int(label[1]) != rank:
        problem = f"the label says rank {label[1]}; expected rank {rank}, as the ranks stand in order"
        raise FormatError(problem, file=file, line=number, column=label.start(1) + 1)
    found = [(word.start(), word.group()) for word in _WORD.finditer(line, label.end() if label else 0)]
    if label is None and (not found or found[0][1].startswith(MARK)):
        return None
    for index, (begin, word) in enumerate(found):
        if word == CUT:
            raise FormatError(
                "the drawing is cut off here; expected all of it", file=file, line=number, column=begin + 1
            )
        if word == GOES_ON and (index == 0 or found[index - 1][1] == IDLE):
            problem = "nothing goes on here; expected an action before ="
            raise FormatError(problem, file=file, line=number, column=begin + 1)
    return [(begin, word) for begin, word in found if word not in (IDLE, GOES_ON)]


def _whole(word: str) -> str:
    """A pair may be drawn without its name."""
    return word + PAIR_SUFFIX if word.startswith("(") and word.endswith(")") else word
