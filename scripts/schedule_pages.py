#!/usr/bin/env python
"""Write docs/schedules.md, and a page with pictures for each kind of placement in docs/schedules/.

Usage: scripts/schedule_pages.py     A house test compares the pages and pictures with what the families say now.

The written text is src/penstock/cli/handbook.md, which `penstock schedules --to markdown` prints with all families.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import penstock as ps  # noqa: E402
from penstock.cli.handbook import FAMILIES as FAMILIES_MARK  # noqa: E402
from penstock.cli.handbook import (  # noqa: E402
    LEGEND,
    NUM_SLICES,
    UNITS,
    differences,
    draw_example,
    family_section,
    written_text,
)
from penstock.ir.operations import Kind  # noqa: E402
from penstock.ir.timeline import Timeline  # noqa: E402
from penstock.schedules import FAMILIES, Family, build  # noqa: E402
from penstock.show.palette import THEMES, Theme, block_colours, ink_on  # noqa: E402

DOCS = ROOT / "docs"
GENERATED = "<!-- written by scripts/schedule_pages.py -->"
UNIT, ROW, LEFT, GAP = 20, 22, 56, 4
"""Pixels: of one unit of time, of a rank with its gap, left of the first unit, and between two ranks."""

# Of each kind: its heading, what its placements look like, and what they have in common.
KINDS = {
    "line": (
        "Schedules on a line",
        "rank     0      1      2      3\nstage    0  ->  1  ->  2  ->  3",
        "Each rank holds one stage. Messages go to the next rank and come back from it, so these schedules send least.",
    ),
    "loop": (
        "Schedules on a loop",
        "rank     0      1      2      3\nstage    0  ->  1  ->  2  ->  3  ->\n      -> 4  ->  5  ->  6  ->  7",
        "Each rank holds several stages, and a microbatch visits the ranks several times. Smaller stages make the "
        "bubble smaller, and the messages more.",
    ),
    "v": (
        "Schedules on a V or a wave",
        "rank     0      1      2      3\nstage    0  ->  1  ->  2  ->  3\n         7  <-  6  <-  5  <-  4",
        "A microbatch goes down the ranks and comes back: the last rank passes it on to itself. The first rank holds "
        "the first and the last stage. A wave repeats the V.",
    ),
    "bidirectional": (
        "Bidirectional schedules",
        "rank     0      1      2      3\none way  0  ->  1  ->  2  ->  3\nother    3  <-  2  <-  1  <-  0",
        "Half of the microbatches enter at the first rank and half at the last one. Each rank holds two stages of two "
        "copies of the model, so the weights are kept twice.",
    ),
}


def pages() -> dict[str, str]:
    """Return the text of every page by its path in docs/."""
    found = {"schedules.md": index_page()}
    return found | {f"schedules/{kind}.md": kind_page(kind) for kind in KINDS}


def kind_of(family: Family) -> str:
    first = re.split(r"\W", family.placement)[0].lower()
    return "v" if first == "wave" else first


def index_page() -> str:
    rows = [
        f"| [`{family.name}`](schedules/{kind_of(family)}.md#{family.name}) | {family.placement.partition(':')[0]} "
        f"| {family.advice} |"
        for family in FAMILIES.values()
    ]
    places = ", ".join(f"[{kind}](schedules/{kind}.md)" for kind in KINDS)
    table = [
        f"A page for each kind of placement has the pictures, the papers, and formulas of bubble and memory: {places}.",
        "",
        "| family | placement | when to use it |",
        "|---|---|---|",
        *rows,
    ]
    title, _, rest = written_text(list(FAMILIES.values())).partition("\n")
    return f"{title}\n\n{GENERATED}\n{rest.replace(FAMILIES_MARK, chr(10).join(table))}"


def kind_page(kind: str) -> str:
    title, drawing, text = KINDS[kind]
    families = [family for family in FAMILIES.values() if kind_of(family) == kind]
    names = ", ".join(f"[{family.name}](#{family.name})" for family in families)
    head = [
        f"# {title}",
        GENERATED,
        f"{text} Families: {names}. [Schedules](../schedules.md) says which one to take.",
        f"```text\n{drawing}\n```",
        f"{LEGEND} {UNITS}",
        "In the pictures each rank has a row, numbers are microbatches, and grey is idle time. "
        "F is blue, B orange, I green and W purple; shades of a colour are the stages of a rank.",
    ]
    return "\n\n".join([*head, *map(section, families)]) + "\n"


def section(family: Family) -> str:
    """Return a family's section, with its picture, its paper as a link and its grid as what a command prints."""
    text = family_section(family, draw_example(family), family.options).replace("###", "##", 1)
    text = re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)
    facts, _, example = text.partition("\n```\n")
    heading, summary, facts = facts.split("\n\n", 2)
    console = "\n".join(["```console", "$ " + example.replace("\n\n", "\n", 1)])
    told = [f"Differs from its source: {difference}" for difference in differences(family.name)]
    return "\n\n".join([heading, summary, picture_tag(family), facts.rstrip(), console, *told])


def picture_tag(family: Family) -> str:
    ranks, microbatches = family.example
    place = f"../pictures/schedules/{family.name}"
    words = f"{family.name} on {ranks} ranks with {microbatches} microbatches"
    return (
        f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="{place}-dark.svg">\n'
        f'  <img alt="{words}" src="{place}-light.svg">\n</picture>'
    )


# ---- pictures: small SVG files without fonts of their own, so that all families together stay below half a megabyte


def pictures() -> dict[str, str]:
    """Return every picture by its path in docs/pictures/."""
    drawn = {family.name: example(family) for family in FAMILIES.values()}
    return {
        f"schedules/{name}-{theme.name}.svg": draw(timeline, theme)
        for name, timeline in drawn.items()
        for theme in THEMES.values()
    }


def example(family: Family) -> Timeline:
    ranks, microbatches = family.example
    slices = NUM_SLICES if family.takes_slices else 1
    schedule = build(family.name, ranks=ranks, microbatches=microbatches, slices=slices)
    return ps.simulate(schedule, ps.Costs.uniform(forward=1, backward_input=1, backward_weight=1))


def draw(timeline: Timeline, theme: Theme) -> str:
    width, height = LEFT + round(timeline.makespan_s * UNIT) + GAP, timeline.num_ranks * ROW + GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11" text-anchor="middle">',
        f'<rect width="{width}" height="{height}" fill="{theme.background}"/>',
    ]
    for rank in range(timeline.num_ranks):
        lines += draw_rank(timeline, rank, theme, width - LEFT - GAP)
    return "\n".join([*lines, "</svg>"]) + "\n"


def draw_rank(timeline: Timeline, rank: int, theme: Theme, width: int) -> Iterator[str]:
    program = timeline.program
    top = rank * ROW + GAP
    yield f'<text x="{LEFT // 2}" y="{top + 13}" fill="{theme.ink}">rank {rank}</text>'
    yield f'<rect x="{LEFT}" y="{top}" width="{width}" height="{ROW - GAP}" fill="{theme.bubble}"/>'
    rows = program.compute_rows(rank).tolist()
    stages = sorted({int(program.stage[row]) for row in rows})
    colours = block_colours(len(stages))
    for row in rows:
        is_first, is_second = bool(program.joined[row]), row > rows[0] and bool(program.joined[row - 1])
        height = (ROW - GAP) / (2 if is_first or is_second else 1)  # of an overlapped pair each has half of the row
        above = top + (height if is_second else 0)
        left = LEFT + round(float(timeline.start_s[row]) * UNIT, 1)
        wide = round(float(timeline.end_s[row] - timeline.start_s[row]) * UNIT, 1) - 1
        colour = colours[Kind(program.op[row])][stages.index(int(program.stage[row]))]
        yield f'<rect x="{left:g}" y="{above:g}" width="{wide:g}" height="{height:g}" fill="{colour}"/>'
        yield (
            f'<text x="{left + wide / 2:g}" y="{above + height / 2 + 4:g}" font-size="{min(11, height):g}" '
            f'fill="{ink_on(colour)}">{program.microbatch[row]}</text>'
        )


def main() -> None:
    texts = {DOCS / name: text for name, text in pages().items()}
    texts |= {DOCS / "pictures" / name: text for name, text in pictures().items()}
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
