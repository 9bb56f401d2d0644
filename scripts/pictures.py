#!/usr/bin/env python
"""Draw the pictures of README.md and docs/ into docs/pictures/, each as NAME-light.svg and NAME-dark.svg.

Usage: scripts/pictures.py [--output FOLDER] [NAME ...]     Without names, all. The same code gives the same bytes.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import penstock as ps  # noqa: E402
from penstock.ir.timeline import Timeline  # noqa: E402
from penstock.show.caption import add_legend, add_title, name_ranks  # noqa: E402
from penstock.show.figures import idle_share  # noqa: E402
from penstock.show.lanes import Detail, Lane, TimeScale, draw_lanes  # noqa: E402
from penstock.show.palette import THEMES, Theme  # noqa: E402
from penstock.show.sheet import Sheet  # noqa: E402
from penstock.show.text import format_seconds, format_share  # noqa: E402

WIDTH, LANE, TOP, HEADING, BOTTOM = 11.0, 0.34, 1.0, 0.45, 0.5
"""Inches: of the drawing, of a lane, of the title and the legend, above each timeline, and below the last one."""


def readme(theme: Theme) -> bytes:
    """The same model and batch under 1F1B and under ZB-V."""
    timelines = {name: timeline_of(name, ranks=4, microbatches=8) for name in ("1f1b", "zbv")}
    title = "One model and one batch on 4 ranks, under two schedules"
    note = "numbers are microbatches; grey: the rank waits; F, I and W take equal time, B = I + W"
    return stacked(timelines, theme, title, note)


def timeline_of(family: str, *, ranks: int, microbatches: int) -> Timeline:
    """Simulate a schedule; the stages of a rank share its work, so that families can be compared."""
    schedule = ps.build(family, ranks=ranks, microbatches=microbatches)
    share = ranks / schedule.num_stages
    costs = ps.Costs.uniform(forward=share, backward_input=share, backward_weight=share)
    return ps.simulate(ps.lower(schedule), costs)


def stacked(timelines: dict[str, Timeline], theme: Theme, title: str, note: str) -> bytes:
    """Draw timelines one below the other on one axis of time."""
    heights = [LANE * timeline.num_ranks for timeline in timelines.values()]
    total = TOP + sum(HEADING + height for height in heights) + BOTTOM
    sheet = Sheet.of(WIDTH, total, theme, "svg")
    add_title(sheet, title, note, [])
    add_legend(sheet, list(timelines.values()))
    scale = TimeScale.of(max(timeline.makespan_s for timeline in timelines.values()))
    below_top = TOP
    for (name, timeline), height in zip(timelines.items(), heights, strict=True):
        sheet.write(f"{name}: {describe(timeline)}", below_top + HEADING - 0.15, size=11, is_bold=True)
        below_top += HEADING + height
        axes = sheet.add_axes(total - below_top, height)
        draw(axes, timeline, scale, sheet)
        axes.tick_params(axis="x", labelbottom=name == list(timelines)[-1])
    axes.set_xlabel(f"time ({scale.name})", fontsize=9, color=theme.ink)
    return sheet.to_bytes()


def describe(timeline: Timeline) -> str:
    """Return its duration, its idle share, and the most microbatches that a rank keeps activations of."""
    peak = max(timeline.peak_activations) * timeline.num_ranks / timeline.program.num_stages
    idle = format_share(timeline.bubble_fraction)
    return f"{format_seconds(timeline.makespan_s)}, ranks wait {idle} of it; at most {peak:g} microbatches in memory"


def draw(axes: Any, timeline: Timeline, scale: TimeScale, sheet: Sheet) -> None:
    """Draw one lane per rank, with its idle share at its right."""
    num_ranks = timeline.num_ranks
    lanes = [Lane(timeline, range(rank, rank + 1), num_ranks - rank - 0.92, 0.84) for rank in range(num_ranks)]
    axes.set_xlim(0, 1.01 * scale.end)
    axes.set_ylim(0, num_ranks)
    axes.spines["left"].set_visible(False)
    draw_lanes(axes, lanes, scale, sheet, Detail.NUMBERED)
    name_ranks(axes, lanes, sheet)
    for lane in lanes:
        share = format_share(idle_share(timeline, lane.ranks))
        axes.annotate(
            f"{share} idle", (1.0, lane.middle), xycoords=("axes fraction", "data"), xytext=(6, 0),
            textcoords="offset points", fontsize=8, color=sheet.theme.ink, va="center",
        )  # fmt: skip


PICTURES: dict[str, Callable[[Theme], bytes]] = {"readme": readme}
"""By the name of the file."""


def main() -> int:
    """Write the pictures that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)}")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "pictures", help="default: docs/pictures")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(PICTURES):
        parser.error(f"unknown picture {sorted(unknown)[0]!r}; expected one of {', '.join(PICTURES)}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or PICTURES:
        for theme in THEMES.values():
            (arguments.output / f"{name}-{theme.name}.svg").write_bytes(PICTURES[name](theme))
    return 0


if __name__ == "__main__":
    sys.exit(main())
