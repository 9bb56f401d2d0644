"""Tables of slots as drawings, and what the tests of V schedules have in common."""

import json
from pathlib import Path
from textwrap import dedent

import numpy as np

from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import Costs, simulate

LETTERS = ".FfbBwoh"
"""Idle, and a letter for each pass: `o` and `h` are weight gradients of the later and of the earlier stage."""

PUBLISHED = json.loads(
    (Path(__file__).parents[2] / "data" / "published_controllable_memory.json").read_text(encoding="utf-8")
)["unit_costs"]


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


def published(name):
    """The published rows of a family."""
    return [row for row in PUBLISHED if row["schedule"] == name]


def timeline(name, ranks, microbatches, **costs):
    """What a schedule of the registry does in time; every part of a stage takes one unit unless given."""
    return simulate(lower(build(name, ranks=ranks, microbatches=microbatches)), Costs.uniform(**costs))


def bubble(name, ranks, microbatches, *, forward=1.0, backward_input=1.0, backward_weight=1.0):
    """Idle time by span, in the unit of the costs."""
    costs = {"forward": forward, "backward_input": backward_input, "backward_weight": backward_weight}
    return timeline(name, ranks, microbatches, **costs).span_s - 2 * microbatches * sum(costs.values())
