"""Drawn grids for a terminal: in blocks of its width, as many as it has lines for, and in color by kind."""

import re
from math import ceil

from penstock.errors import ConfigError
from penstock.ir.grid import grid_columns
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.tables import Screen

COLORS = {"F": "34", "B": "32", "I": "36", "W": "33", "R": "35"}
"""Codes of terminals (ECMA-48) by the letter of an action."""
FAINT = "2"
LINES_AROUND = 4
"""The lines of a terminal's height that a drawing leaves to the prompt and the text below it."""

MAX_CELLS = 1_000_000
"""The most cells of a drawing unless `--to grid` asks for it; a cell takes up to ten characters."""

_WORD = re.compile(r"\S+")
_ACTION = re.compile(r"\(?[0-9]+([FBIWR])[0-9]")
_LABEL = re.compile(r"\s*rank +[0-9]+:")


def require_readable(table: Schedule | Program) -> None:
    """Refuse to draw as text a table that nobody can read, and that takes minutes to draw.

    Raises:
        ConfigError: the table is too large; the message names other formats.
    """
    num_columns = grid_columns(table)
    if num_columns * table.num_ranks > MAX_CELLS:
        raise ConfigError(
            f"{table.name} is too large to read as a grid, with {table.num_ranks} lines of {num_columns} columns. "
            "List it with --output FILE.csv, draw it as a page with --output FILE.html, or ask for it with --to grid"
        )


def on_screen(drawing: str, screen: Screen) -> str:
    """Return a drawing as a screen shows it; a last line says how to see what does not fit."""
    lines = drawing.split("\n")
    if screen.width is None:
        return drawing
    blocks = [lines] if max(map(len, lines)) <= screen.width else in_blocks(drawing, screen.width)
    num_blocks = max(1, (screen.height - LINES_AROUND) // (len(lines) + 1))
    text = "\n\n".join("\n".join(block) for block in blocks[:num_blocks])
    text = colored(text) if screen.has_color else text
    if num_blocks >= len(blocks):
        return text
    hint = f"# the first {num_blocks} of {len(blocks)} parts; all of it: add | less -S, or --output FILE.txt"
    return f"{text}\n\n{screen.wrapped(hint)}"


def in_blocks(drawing: str, width: int) -> list[list[str]]:
    """Return the lines of parts of a drawing, of equal length, that fit a width."""
    lines = drawing.split("\n")
    label = drawing.find(":") + len(": ")
    cell = max((len(word) for line in lines for word in line[label:].split()), default=1) + 1
    num_columns = ceil((max(map(len, lines)) - label) / cell)
    num_parts = ceil(num_columns / max((width - label) // cell, 1))
    part = ceil(num_columns / num_parts) * cell
    begins = [label + index * part for index in range(num_parts)]
    return [[(line[:label] + line[begin : begin + part]).rstrip() for line in lines] for begin in begins]


def colored(drawing: str) -> str:
    """Color the actions of a drawing by their kind; all else of a row is faint."""
    return "\n".join(_colored_line(line) for line in drawing.split("\n"))


def _colored_line(line: str) -> str:
    label = _LABEL.match(line)
    if label is None:
        return line
    code = FAINT

    def with_color(match: "re.Match[str]") -> str:
        nonlocal code
        action = _ACTION.match(match[0])
        if match[0] != "=":  # a `=` goes on with the action before it, in its color
            code = COLORS[action[1]] if action else FAINT
        return f"\x1b[{code}m{match[0]}\x1b[0m"

    return label[0] + _WORD.sub(with_color, line[label.end() :])
