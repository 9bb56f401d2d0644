"""The handbook of schedules: a written text, `handbook.md`, with parts that are made from the families.

`penstock schedules --to markdown` prints it on one page; scripts/schedule_pages.py makes the pages in docs/ of it.
"""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from textwrap import fill

from penstock.cli.pages import LEGEND, NUM_SLICES, UNITS, draw_example, family_page, family_section
from penstock.ir.transports import MODELS
from penstock.schedules import Family, build
from penstock.searching.comparison import Comparison, Refusal, compare
from penstock.simulation import Costs
from penstock.tables import Screen

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
"""Of what is generated and flows."""


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
    """Return what the written text says on how a family differs from its source."""
    listed = re.findall(r"^\* `([\w-]+)`: (.*(?:\n  .*)*)", TEXT.read_text(encoding="utf-8"), re.MULTILINE)
    return [" ".join(text.split()) for family, text in listed if family == name]


def table_of_transports() -> str:
    """Return a table in Markdown of the transport models, their rules and who obeys them."""
    rows = [f"| `{str(model).replace('(1)', '(n)')}` | {model.meaning} | {model.backend} |" for model in MODELS]
    return "\n".join(["| model | what it means | which backend obeys it |", "|---|---|---|", *rows])


def side_by_side(families: Sequence[Family]) -> str:
    """Return a table in Markdown of what is predicted of each family that trains, at one size."""
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
