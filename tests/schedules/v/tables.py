"""Tables of slots as drawings, and what the tests of V schedules have in common."""

from textwrap import dedent

import numpy as np

from penstock.schedules.v.slots import FORWARDS, Pass
from tests.schedules.timing import UNIT, timeline

LETTERS = ".FfbBwoh"
"""Idle, and a letter for each pass: `o` and `h` are weight gradients of the later and of the earlier stage."""


def table(drawing):
    """The table of slots that is drawn, with or without `rank 0:`; shorter lines end in idle slots."""
    lines = [line.rpartition(":")[2].split() for line in dedent(drawing).strip().splitlines()]
    slots = np.zeros((len(lines), max(map(len, lines))), np.int8)
    for rank, letters in enumerate(lines):
        slots[rank, : len(letters)] = [LETTERS.index(letter) for letter in letters]
    return slots


def assert_table(slots, drawing):
    """Compare a table with a drawing, leaving idle slots at the ends of lines aside."""
    assert _drawn(slots) == _drawn(table(drawing))


def _drawn(slots):
    lines = ["".join(LETTERS[each] for each in order).rstrip(".") for order in slots]
    return "\n".join(" ".join(line) for line in lines)


def most_held(slots):
    """The most activations that a rank of a table of slots holds."""
    return int(np.cumsum(np.isin(slots, FORWARDS).astype(int) - (slots == Pass.WEIGHT), axis=1).max())


def bubble(name, ranks, microbatches, costs=UNIT):
    """Idle time by span, in the unit of the costs."""
    return timeline(name, ranks, microbatches, costs).span_s - 2 * microbatches * sum(costs)
