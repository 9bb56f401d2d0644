"""Where commands print: lines and aligned tables to standard output, complaints to standard error."""

import os
import sys
from collections.abc import Sequence


def say(text: str) -> None:
    """Print a result."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def complain(text: str) -> None:
    """Print what went wrong."""
    sys.stderr.write(f"penstock: {text}\n")


def format_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns of text to the left, under underlined headings."""
    lines = [headings, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(_align(line, widths) for line in lines)


def _align(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def forget_stdout() -> None:
    """Point standard output at nothing: its reader is gone, and the interpreter's last flush must not complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
