"""Tables as text, laid out by rich: whole for a pipe or a file, and for a terminal in its width and in color."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill

GAP = 2
"""Spaces between two columns."""
MIN_TEXT_WIDTH = 12
"""A column of text is folded to no less."""


@dataclass(frozen=True, slots=True)
class Screen:
    """Where a table is shown."""

    width: int | None = None
    """The columns of a terminal; None for a pipe or a file, where nothing is folded or left out."""
    has_color: bool = False
    height: int = 24

    def wrapped(self, text: str) -> str:
        """Return lines of prose, folded where they are wider than the screen."""
        if self.width is None:
            return text
        return "\n".join(fill(line, self.width, subsequent_indent=_indent_of(line)) for line in text.split("\n"))


NO_SCREEN = Screen()


@dataclass(frozen=True, slots=True)
class Column:
    """The properties that all cells of a column have in common."""

    heading: str
    is_text: bool = False
    """Flush left, and folded where the screen is narrow unless it may be left out; numbers are flush right."""
    drop_order: int = 0
    """On a narrow screen, columns with the largest number are left out first; those with 0 always stay."""
    style: str = ""


def table_text(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    screen: Screen = NO_SCREEN,
    *,
    row_styles: Sequence[str] = (),
) -> str:
    """Return headings, a rule and the rows, without a final newline.

    To fit the screen, headings of numbers are broken at spaces, then columns of text are folded, and columns are left
    out, which a last line names.
    """
    sized = [_Sized(column, max((len(row[index]) for row in rows), default=0)) for index, column in enumerate(columns)]
    shown, is_broken = _that_fit(sized, screen)
    is_shown = [any(column is shown_column for shown_column in shown) for column in sized]
    cells = [[cell for cell, stays in zip(row, is_shown, strict=True) if stays] for row in rows]
    lines = _rendered_lines(shown, cells, screen, row_styles, is_broken=is_broken)
    missing = [column.heading for column, stays in zip(columns, is_shown, strict=True) if not stays]
    if missing:
        lines.append(screen.wrapped(f"left out at {screen.width} columns: {', '.join(missing)}"))
    return "\n".join(lines)


def fields_text(fields: Sequence[tuple[str, str]], screen: Screen = NO_SCREEN) -> str:
    """Return pairs of a name and its text, the texts aligned and folded within the screen."""
    margin = max(len(name) for name, _ in fields) + GAP
    width = screen.width or 10**9
    return "\n".join(
        fill(
            text, max(width, margin + MIN_TEXT_WIDTH), initial_indent=name.ljust(margin), subsequent_indent=" " * margin
        )
        for name, text in fields
    )


@dataclass(frozen=True, slots=True)
class _Sized:
    column: Column
    cell_width: int
    """The width of the widest cell below the heading."""

    def width(self, *, is_broken: bool, is_folded: bool = False) -> int:
        cells = min(self.cell_width, MIN_TEXT_WIDTH) if is_folded and self.folds else self.cell_width
        return max(cells, *map(len, self.heading(is_broken=is_broken).split("\n")))

    @property
    def folds(self) -> bool:
        return self.column.is_text and not self.column.drop_order

    def heading(self, *, is_broken: bool) -> str:
        text = self.column.heading
        return text.replace(" ", "\n") if is_broken and not self.column.is_text else text


def _that_fit(columns: list[_Sized], screen: Screen) -> tuple[list[_Sized], bool]:
    """Return the columns to show, and whether their headings are broken at spaces."""
    if screen.width is None or _total_width(columns, is_broken=False) <= screen.width:
        return columns, False
    droppable = [sized for sized in columns if sized.column.drop_order]
    droppable.sort(key=lambda sized: sized.column.drop_order)
    while droppable and _total_width(columns, is_broken=True, is_folded=True) > screen.width:
        dropped = droppable.pop()
        columns = [sized for sized in columns if sized is not dropped]
    return columns, True


def _total_width(columns: Sequence[_Sized], *, is_broken: bool, is_folded: bool = False) -> int:
    widths = [sized.width(is_broken=is_broken, is_folded=is_folded) for sized in columns]
    return sum(widths) + GAP * (len(widths) - 1)


def _indent_of(line: str) -> str:
    return " " * (len(line) - len(line.lstrip()))


def _rendered_lines(
    columns: Sequence[_Sized],
    rows: Sequence[Sequence[str]],
    screen: Screen,
    row_styles: Sequence[str],
    *,
    is_broken: bool,
) -> list[str]:
    """Return the lines of a table as rich draws it: headings, a rule, and the rows.

    `columns` are those that fit the screen, with the width of their cells. `rows` have a text for each of them, and
    `row_styles` a style of rich for each row, or nothing. `is_broken` says whether headings of numbers are broken at
    spaces. With a screen in color the lines have escape codes.
    """
    # rich takes long to import, and most commands of the command line show no table.
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # rich describes a box by eight lines of four characters; only the rule below the headings is drawn.
    ruled = Box("\n".join(["    ", "    ", " ── ", *["    "] * 5]) + "\n")
    table = Table(box=ruled, show_edge=False, pad_edge=False, padding=(0, 0, 0, GAP - 1), border_style="dim")
    # Columns of text are folded where the screen is narrow; columns of numbers never are.
    for sized in columns:
        table.add_column(
            Text(sized.heading(is_broken=is_broken)),
            justify="left" if sized.column.is_text else "right",
            style=sized.column.style,
            overflow="fold",
            no_wrap=not sized.folds,
            min_width=sized.width(is_broken=is_broken, is_folded=True),
        )
    for index, row in enumerate(rows):
        table.add_row(*map(Text, row), style=row_styles[index] if row_styles else None)
    # Draw into a string. Without the width of a terminal, the table gets the width that it needs.
    file = io.StringIO()
    console = Console(
        file=file,
        width=screen.width or _total_width(columns, is_broken=False),
        force_terminal=screen.has_color,
        color_system="standard" if screen.has_color else None,
        no_color=False,
        legacy_windows=False,
    )
    console.print(table)
    return [line.rstrip() for line in file.getvalue().rstrip("\n").split("\n")]
