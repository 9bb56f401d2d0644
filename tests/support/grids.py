"""`assert_grid`: the order of a schedule, compared with a drawing."""

from difflib import ndiff
from textwrap import dedent

from penstock.ir.grid import from_grid, to_grid


def assert_grid(schedule, drawing):
    """Compare the orders of all ranks with a drawing, timed or plain; a failure shows both and the difference.

    A drawing with idle units is compared in time as well.
    """
    timed = " ." in drawing or " =" in drawing
    expected = to_grid(from_grid(drawing), timed=False)
    actual = to_grid(schedule, timed=False)
    if timed:
        expected, actual = _normal(drawing), _normal(to_grid(schedule))
    assert actual == expected, "\n".join(
        [
            "the order is",
            actual,
            "but expected is",
            expected,
            "difference",
            *ndiff(expected.split("\n"), actual.split("\n")),
        ]
    )


def _normal(drawing):
    """One line per rank, with single blanks, without labels and without idle units at the end."""
    lines = [line.rpartition(":")[2].split() for line in dedent(drawing).strip().splitlines()]
    for words in lines:
        while words[-1] == ".":
            words.pop()
    return "\n".join(" ".join(words) for words in lines)
