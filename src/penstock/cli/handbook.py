"""Families of schedules: a table of all, a page on each, and the handbook of schedules.

The handbook is a written text, `handbook.md`, with parts that are made from the families. `penstock schedules --to
markdown` prints it on one page; scripts/schedule_pages.py makes the pages in docs/ of it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import fill

from penstock.cli.drawing import on_screen
from penstock.errors import PenstockError
from penstock.ir.grid import to_grid
from penstock.ir.transports import MODELS
from penstock.schedules import Family, Option, build
from penstock.searching.comparison import Comparison, Refusal, compare
from penstock.simulation import Costs
from penstock.tables import Column, Screen, fields_text, table_text

TEXT = Path(__file__).with_name("handbook.md")
SIDE_BY_SIDE, FAMILIES, TRANSPORTS = "<!-- side by side -->", "<!-- families -->", "<!-- transports -->"
RANKS, MICROBATCHES = 4, 8
CONDITIONS = (
    f"{RANKS} ranks, {MICROBATCHES} microbatches, and equal work for all: what a rank does for one microbatch takes 1 s"
    " forward, 1 s for the input gradient and 1 s for the weight gradient, shared by its stages and slices. "
    "Transfers take no time, and two actions that overlap take no less than one after the other. Memory is that of the "
    "fullest rank, in microbatches: what one microbatch leaves on a rank counts 1."
)
WIDTH = 132
"""The width of generated paragraphs, in characters."""
LEGEND = (
    "p ranks, m microbatches, v stages per rank, k slices, s a rank counted from 0; F, B and W are the times of a "
    "stage's forward, and of the input and the weight gradient of its backward. Memory is in activations on rank s."
)
UNITS = "A column is one unit of time: F, I and W take one, B two; `.` is idle, `=` goes on."
PAGE_WIDTH = 120
"""The width of a page that goes to no terminal, in characters."""
ALL_LINES = 10**6
NUM_SLICES = 2
"""The number of slices in the drawings of families that cut microbatches."""


def handbook(families: Sequence[Family]) -> str:
    """Return the whole page in Markdown."""
    sections = "\n\n".join(family_section(family, draw_example(family), family.options) for family in families)
    return written_text(families).replace(FAMILIES, fill(f"{LEGEND} {UNITS}", WIDTH) + f"\n\n{sections}")


def written_text(families: Sequence[Family]) -> str:
    """Return the text with its generated tables, and a mark where the families belong."""
    text = TEXT.read_text(encoding="utf-8")
    return text.replace(SIDE_BY_SIDE, side_by_side(families)).replace(TRANSPORTS, table_of_transports())


def family_text(family: Family, *, screen: Screen, as_markdown: bool) -> str:
    """Return all about one family, for a screen or in Markdown."""
    drawing, deviations = draw_example(family), differences(family.name)
    if not as_markdown:
        return family_page(family, drawing, deviations, screen)
    section = family_section(family, drawing, family.all_options)
    return "\n".join([section, *(f"\nDiffers from its source: {text}" for text in deviations)])


def differences(name: str) -> list[str]:
    """Return the differences between a family and its source, as the written text has them."""
    listed = re.findall(r"^\* `([\w-]+)`: (.*(?:\n  .*)*)", TEXT.read_text(encoding="utf-8"), re.MULTILINE)
    return [" ".join(text.split()) for family, text in listed if family == name]


def table_of_transports() -> str:
    """Return a table in Markdown of the transport models, their rules and who obeys them."""
    rows = [f"| `{str(model).replace('(1)', '(n)')}` | {model.meaning} | {model.backend} |" for model in MODELS]
    return "\n".join(["| model | what it means | which backend obeys it |", "|---|---|---|", *rows])


def side_by_side(families: Sequence[Family]) -> str:
    """Return a table in Markdown of the predicted figures of each family that trains, at one size."""
    lines = [
        fill(CONDITIONS, WIDTH),
        "",
        "| | makespan | bubble fraction | bubble rate | memory | messages |",
        "|---|---|---|---|---|---|",
    ]
    for family in families:
        slices = NUM_SLICES if family.takes_slices else 1
        name = f"{family.name}:slices={slices}" if family.takes_slices else family.name
        make = partial(build, family.name, ranks=RANKS, microbatches=MICROBATCHES, slices=slices)
        if family.name != "forward-only":
            lines.append(_row(compare(name, make, Costs.uniform())))
    return "\n".join(lines)


def _row(row: Comparison | Refusal) -> str:
    if isinstance(row, Refusal):
        return f"| `{row.name}` | {row.reason} | | | | |"
    cells = [
        f"`{row.name}`",
        f"{row.makespan_s:.4g} s",
        f"{max(row.bubble_fraction, 0.0):.3f}",
        f"{max(row.bubble_rate, 0.0):.3f}",
        f"{float(row.peak_microbatches):.4g}",
        str(row.num_messages),
    ]
    return f"| {' | '.join(cells)} |"


# ---- single families


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
    screen = replace(screen, width=screen.width or PAGE_WIDTH)
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
    """Return the labels and texts of a family's page."""
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
    return f"{option.values} (default {option.default}): {option.help}"
