"""The parts that all proofs share: the table under proof with what is found, which ends in one error with a picture."""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from operator import attrgetter

import numpy as np

from penstock.errors import MAX_SHOWN, ScheduleError, Violation
from penstock.ir.hot import Array, Int32s
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table

MAX_COLUMNS = 12
MAX_RANKS = 8
HERE = "<-- here"


@dataclass(eq=False)
class Subject:
    """The table under proof, the columns that all proofs read, and the violations found so far."""

    table: Table
    violations: list[Violation] = field(default_factory=list)
    suspects: list[Violation] = field(default_factory=list)
    """Violations that may well be the cause of all others; they are shown first."""

    @property
    def program(self) -> Program:
        """The table, where it is known to be a program."""
        assert isinstance(self.table, Program)
        return self.table

    @cached_property
    def schedule(self) -> Schedule:
        """The computations of the table."""
        actions: Schedule = self.table.actions()
        return actions

    @cached_property
    def action_row(self) -> Int32s:
        """[num_actions] the row of the table for each of its computations."""
        return self.table.compute_rows().astype(np.int32)

    @cached_property
    def rank_of_stage(self) -> Int32s:
        """[num_stages] the rank that holds each stage."""
        return np.array(self.table.placement.rank_of_stage, np.int32)

    @property
    def rank(self) -> Int32s:
        """[num_rows] the rank that runs each row."""
        return self.table.rank_of_row

    def position(self, row: int) -> int:
        """Return the row's index in its rank's order, counted from 0."""
        return int(row - self.table.offsets[self.rank[row]])

    def text(self, row: int) -> str:
        return str(self.table.row(row))

    def place(self, row: int, *, seen_from: int | None = None) -> str:
        """Return `0F0 (rank 1, position 3)`; without the rank if the row it is seen from has the same."""
        same_rank = seen_from is not None and self.rank[row] == self.rank[seen_from]
        where = "" if same_rank else f"rank {self.rank[row]}, "
        return f"{self.text(row)} ({where}position {self.position(row)})"

    def add(self, row: int, problem: str, fix: str, *, is_suspect: bool = False) -> None:
        """Add a violation of a row; a suspect is one that may be the cause of all others."""
        violations = self.suspects if is_suspect else self.violations
        violations.append(Violation(int(self.rank[row]), self.position(row), self.text(row), problem, fix))

    def add_missing(self, rank: int, problem: str, fix: str) -> None:
        """Add a violation at the end of a rank's order, where something is missing."""
        end = int(self.table.offsets[rank + 1] - self.table.offsets[rank])
        self.violations.append(Violation(rank, end, "", problem, fix))

    def raise_if_any(self) -> None:
        """Raise one error with all violations: first the suspects, then by rank and position.

        Raises:
            ScheduleError: if anything was found.
        """
        place = attrgetter("rank", "position")
        violations = sorted(self.suspects, key=place) + sorted(self.violations, key=place)
        if not violations:
            return
        kind = type(self.table).__name__.lower()
        count = len(violations)
        title = f"{self.table.name}: the {kind} breaks {count} rule{'s' if count > 1 else ''}"
        marks = {(violation.rank, violation.position) for violation in violations[:MAX_SHOWN]}
        raise ScheduleError(title, violations, draw(self, marks))


def draw(subject: Subject, marks: set[tuple[int, int]]) -> str:
    """Draw the orders around the first mark, a line per rank, with the marked places as `>0F0<`.

    `marks` are (rank, position). Large tables are cut to a window of ranks and positions.
    """
    first_rank, first_position = min(marks)
    begin = max(0, first_position - MAX_COLUMNS // 2)
    ranks = list(range(subject.table.num_ranks))
    if len(ranks) > MAX_RANKS:
        ranks = sorted(list(dict.fromkeys([first_rank, *sorted({rank for rank, _ in marks})]))[:MAX_RANKS])
    lines = {rank: _cells(subject, rank, begin, marks) for rank in ranks}
    num_columns = max(len(cells) for cells in lines.values())
    heads = [str(position) for position in range(begin, begin + num_columns)]
    columns = list(zip_longest(heads, *lines.values(), fillvalue=""))
    widths = [max(len(cell) for cell in column) for column in columns]
    drawing = []
    for label, cells in (("position", heads), *((f"rank {rank}", cells) for rank, cells in lines.items())):
        text = "  ".join(cell.center(width) for cell, width in zip(cells, widths, strict=False))
        note = f"  {HERE}" if any(cell.startswith(">") for cell in cells) else ""
        drawing.append(f"{label:10}{text}".rstrip() + note)
    return "\n".join(drawing)


def _cells(subject: Subject, rank: int, begin: int, marks: set[tuple[int, int]]) -> list[str]:
    start, stop = (int(offset) for offset in subject.table.offsets[rank : rank + 2])
    cells = []
    for position in range(begin, begin + MAX_COLUMNS):
        row = start + position
        text = subject.text(row) if row < stop else "."  # a mark after the end: something is missing
        if (rank, position) in marks:
            cells.append(f">{text}<")
        elif row < stop:
            cells.append(text)
    return cells


def first_of_each(groups: Array, rows: Array) -> list[int]:
    """Return, for every value in `groups`, the first of its `rows`."""
    _, first = np.unique(groups, return_index=True)
    return [int(rows[index]) for index in np.sort(first)]
