"""Families of schedules on pages: a table of all, and a page on each, for a terminal and in Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.cli.drawing import on_screen
from penstock.errors import PenstockError
from penstock.ir.grid import to_grid
from penstock.schedules import Choice, Family, Option, build
from penstock.tables import Column, Screen, fields_text, table_text

LEGEND = (
    "p ranks, m microbatches, v stages per rank, k slices, s a rank counted from 0; F, B and W are the times of a "
    "stage's forward, and of the input and the weight gradient of its backward. Memory is in activations on rank s."
)
UNITS = "A column is one unit of time: F, I and W take one, B two; `.` is idle, `=` goes on."
WIDTH = 120
"""Of a page that goes to no terminal."""
ALL_LINES = 10**6
NUM_SLICES = 2
"""In the drawings of families that cut microbatches."""


def table_page(families: Sequence[Family], screen: Screen) -> str:
    """Return one line per family: what it is and, where there is room, when to take it."""
    columns = [
        Column("name", is_text=True, style="cyan"),
        Column("what it is", is_text=True),
        Column("when to take it", is_text=True, drop_order=1),
    ]
    rows = [[family.name, family.summary, family.advice] for family in families]
    more = "penstock schedules NAME says all about one: its order, bubble, memory, limits, options and source."
    return f"{table_text(columns, rows, screen)}\n\n{screen.wrapped(more)}"


def family_page(family: Family, drawing: str, differences: Sequence[str], screen: Screen) -> str:
    """Return all about one family, with its example drawn in blocks that fit the screen."""
    screen = replace(screen, width=screen.width or WIDTH)
    facts = [*_facts(family, family.all_options), *(("differs", text) for text in differences)]
    parts = [
        screen.wrapped(f"{family.name}: {family.summary}"),
        command(family),
        on_screen(drawing, replace(screen, height=ALL_LINES)),
        screen.wrapped(UNITS),
        fields_text(facts, screen),
        screen.wrapped(LEGEND),
    ]
    return "\n\n".join(parts)


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
