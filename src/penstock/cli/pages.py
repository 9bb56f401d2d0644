"""Families of schedules on pages: a table of all, and a page on each, for a terminal and in Markdown."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from math import ceil
from textwrap import wrap

from penstock.errors import PenstockError
from penstock.ir.grid import to_grid
from penstock.schedules import Choice, Family, Option, build

LEGEND = (
    "p ranks, m microbatches, v stages per rank, k slices, s a rank counted from 0; F, B and W are the times of a "
    "stage's forward, and of the input and the weight gradient of its backward. Memory is in activations on rank s."
)
UNITS = "A column is one unit of time: F, I and W take one, B two; `.` is idle, `=` goes on."
MIN_WIDTH, MAX_WIDTH = 100, 160
NUM_SLICES = 2
"""In the drawings of families that cut microbatches."""
GAP = "  "


def table_page(families: Sequence[Family], width: int) -> str:
    """Return a row of figures per family, and below it when to use it, at a width between 100 and 160."""
    headings = ("name", "placement", "restrictions", "bubble", "memory")
    name = max(len(family.name) for family in families)
    width = min(max(width, MIN_WIDTH), MAX_WIDTH)
    room = width - name - len(GAP) * (len(headings) - 1)
    placement = room // 5
    widths = (name, placement, *[(room - placement) // 3] * 3)
    lines = [*_row(headings, widths), GAP.join("-" * column for column in widths)]
    for family in families:
        lines += _row((family.name, family.placement, family.restrictions, family.bubble, family.memory), widths)
        margin = " " * (name + len(GAP))
        lines += wrap(family.advice, width, initial_indent=margin, subsequent_indent=margin)
    return "\n".join([*lines, "", *wrap(LEGEND, width), "`penstock schedules NAME` says more."])


def _row(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    """The lines of one row, each cell wrapped to the width of its column."""
    columns = [wrap(cell, width) for cell, width in zip(cells, widths, strict=True)]
    return [
        GAP.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in zip_longest(*columns, fillvalue="")
    ]


def family_page(family: Family, drawing: str, differences: Sequence[str], width: int) -> str:
    """Return all about one family, with its example drawn in blocks that fit the width."""
    facts = [*_facts(family, family.all_options), *(("differs", text) for text in differences)]
    margin = max(len(name) for name, _ in facts) + len(GAP)
    lines = [f"{family.name}: {family.summary}", "", command(family), "", *_blocks(drawing, width), UNITS, ""]
    for name, fact in facts:
        lines += wrap(fact, width, initial_indent=name.ljust(margin), subsequent_indent=" " * margin)
    return "\n".join([*lines, "", *wrap(LEGEND, width)])


def family_section(family: Family, drawing: str, options: Mapping[str, Option]) -> str:
    """Return all about one family, with these of its options, but how it differs from its source, in Markdown."""
    facts = [f"* {name}: {fact}" for name, fact in _facts(family, options)]
    summary = f"{family.summary[:1].upper()}{family.summary[1:]}."
    return "\n".join([f"### {family.name}", "", summary, "", *facts, "", "```", command(family), "", drawing, "```"])


def draw_example(family: Family) -> str:
    """Return the grid of a family's example, or why it cannot be made: a family of others may be wrong in that."""
    ranks, microbatches = family.example
    slices = NUM_SLICES if family.takes_slices else 1
    try:
        return to_grid(build(family.name, ranks=ranks, microbatches=microbatches, slices=slices))
    except PenstockError as error:
        return str(error)


def command(family: Family) -> str:
    """Return the command that draws a family's example."""
    ranks, microbatches = family.example
    slices = f" --slices {NUM_SLICES}" if family.takes_slices else ""
    return f"penstock show {family.name} --ranks {ranks} --microbatches {microbatches}{slices}"


def _facts(family: Family, options: Mapping[str, Option]) -> list[tuple[str, str]]:
    """What a page says on a family: (label, text)."""
    facts = [
        ("source", family.source),
        ("placement", family.placement),
        ("restrictions", family.restrictions),
        ("bubble", family.bubble),
        ("memory", family.memory),
        ("advice", family.advice),
    ]
    if len(family.stages_per_rank) > 1:
        facts.append(("--stages-per-rank", f"{family.stages_per_rank[0]} unless given"))
    if family.takes_slices:
        facts.append(("--slices", "1 unless given"))
    return facts + [(f"option {name}", _option(option)) for name, option in options.items()]


def _option(option: Option) -> str:
    values = " or ".join(option.choices) if isinstance(option, Choice) else "a number"
    return f"{values} (default {option.default}): {option.help}"


def _blocks(drawing: str, width: int) -> list[str]:
    """A drawing in parts of equal length that fit the width; an empty line follows each."""
    lines = drawing.split("\n")
    label = drawing.find(":") + len(": ")
    cell = max((len(word) for line in lines for word in line[label:].split()), default=1) + 1
    num_columns = ceil((max(map(len, lines)) - label) / cell)
    num_parts = ceil(num_columns / max((width - label) // cell, 1))
    part = ceil(num_columns / num_parts) * cell
    begins = [label + index * part for index in range(num_parts)]
    drawn = [[(line[:label] + line[begin : begin + part]).rstrip() for line in lines] for begin in begins]
    return [line for lines in drawn for line in (*lines, "")]
