"""Timelines as pictures, one lane per rank: SVG or PNG, drawn by matplotlib.

rank 0  [0][1][2][3]      [0 ] [1 ]      blocks coloured by kind, shaded by stage, numbered with their microbatch;
rank 1     [0][1][2][0 ][3][1 ]          a bubble is where the grey lane shows
alive   _/‾‾‾‾‾‾‾‾‾‾\\_______              activations (or bytes) that each rank keeps
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.errors import ConfigError
from penstock.ir.timeline import Timeline
from penstock.show.bars import last_end_s
from penstock.show.caption import add_lane_figures, add_legend, add_title, name_ranks, notes_on, top_margin
from penstock.show.density import lanes_of_ranks
from penstock.show.figures import describe_shape, figures_of
from penstock.show.lanes import Detail, Lane, TimeScale, choose_detail, draw_lanes
from penstock.show.layout import longest_number, typical_block_s
from penstock.show.memory_panel import draw_memory
from penstock.show.palette import find_theme
from penstock.show.sheet import MARGIN_BOTTOM, Sheet, scale_of
from penstock.show.text import format_seconds, format_share

MIN_WIDTH, MAX_WIDTH, MERGED_WIDTH = 8.0, 16.0, 13.0
"""Widths of the lanes, in inches: the least, the most, and that of merged blocks."""
DIGIT_ROOM = 0.1
"""The width of a digit of a typical block's number, in inches."""
MIN_LANE, MAX_LANE, LANES_HEIGHT = 0.13, 0.42, 7.0
"""Heights of one lane, and how much all of them may take before they get lower, in inches."""
MEMORY_HEIGHT, GAP = 1.5, 0.25


def timeline_chart(
    timeline: Timeline,
    *,
    format: str = "svg",
    title: str | None = None,
    theme: str = "light",
    more: Mapping[str, str] | None = None,
) -> bytes:
    """Draw a timeline as `svg` or `png`: a lane per rank, and the memory of the ranks below.

    `more` are further figures by name, written beside the timeline's own.

    Raises:
        ConfigError: for an unknown format or theme, or if matplotlib is not installed.
    """
    lanes = _lanes_of_ranks(timeline)
    scale = TimeScale.of(last_end_s(timeline))
    width, detail = _width_and_detail(lanes, scale)
    notes = notes_on(lanes, detail, scale, width)
    lanes_height = scale_of(width) * _lanes_height(len(lanes), MIN_LANE, MAX_LANE)
    bottom, memory_height = scale_of(width) * MARGIN_BOTTOM, scale_of(width) * MEMORY_HEIGHT
    height = top_margin(notes, width) + lanes_height + GAP + memory_height + bottom
    # The axes are placed from the bottom up: time, memory, lanes, and figures and title in the top margin.
    sheet = Sheet.of(width, height, find_theme(theme), format)
    axes = sheet.add_axes(bottom + memory_height + GAP, lanes_height)

    _draw_named_lanes(axes, lanes, scale, sheet, detail)
    axes.tick_params(axis="x", labelbottom=False)
    add_lane_figures(axes, lanes, scale, sheet, names_source=False)
    draw_memory(sheet.add_axes(bottom, memory_height), timeline, scale, sheet)
    figures = "  ·  ".join(f"{name} {figure}" for name, figure in (figures_of(timeline) | dict(more or {})).items())
    add_title(sheet, title or f"{describe_shape(timeline.program)}, {timeline.source}", figures, notes)
    add_legend(sheet, [timeline])
    return sheet.to_bytes()


def overlay_chart(measured: Timeline, predicted: Timeline, *, format: str = "svg", theme: str = "light") -> bytes:
    """Draw a measured timeline and its prediction as `svg` or `png`, the two lanes of each rank one above the other.

    Raises:
        ConfigError: for timelines of different numbers of ranks, an unknown format or theme, or if matplotlib is not
            installed.
    """
    if predicted.num_ranks != measured.num_ranks:
        raise ConfigError(
            f"measured on {measured.num_ranks} ranks, predicted for {predicted.num_ranks}; "
            "overlay two runs of one program"
        )
    lanes = [
        lane
        for pair in zip(
            _lanes_of_ranks(measured, 0.51, 0.39), _lanes_of_ranks(predicted, 0.09, 0.39, 0.45), strict=True
        )
        for lane in pair
    ]
    scale = TimeScale.of(max(last_end_s(measured), last_end_s(predicted)))
    width, detail = _width_and_detail(lanes, scale)
    notes = notes_on(lanes, detail, scale, width)
    lanes_height = scale_of(width) * _lanes_height(len(lanes) // 2, 2 * MIN_LANE, 0.72)
    bottom = scale_of(width) * MARGIN_BOTTOM
    sheet = Sheet.of(width, top_margin(notes, width) + lanes_height + bottom, find_theme(theme), format)
    axes = sheet.add_axes(bottom, lanes_height)

    _draw_named_lanes(axes, lanes, scale, sheet, detail)
    axes.set_xlabel(f"time ({scale.name})", fontsize=9 * sheet.scale, color=sheet.theme.ink)
    add_lane_figures(axes, lanes, scale, sheet, names_source=True)
    figures = "  ·  ".join(
        f"{name}: bubble {format_share(timeline.bubble_fraction)}, makespan {format_seconds(timeline.makespan_s)}"
        for name, timeline in (("measured", measured), ("predicted", predicted))
    )
    add_title(sheet, f"{describe_shape(measured.program)}: measured above predicted", figures, notes)
    add_legend(sheet, [measured, predicted])
    return sheet.to_bytes()


def _lanes_of_ranks(timeline: Timeline, low: float = 0.08, height: float = 0.84, paleness: float = 0.0) -> list[Lane]:
    """Return the timeline's lanes from the top down, each in a row of height 1."""
    ranks_of_lanes = lanes_of_ranks(timeline.num_ranks)
    highest = len(ranks_of_lanes) - 1 + low
    return [Lane(timeline, ranks, highest - row, height, paleness) for row, ranks in enumerate(ranks_of_lanes)]


def _lanes_height(num_rows: int, lowest: float, highest: float) -> float:
    return max(num_rows * float(np.clip(LANES_HEIGHT / num_rows, lowest, highest)), 0.9)


def _width_and_detail(lanes: list[Lane], scale: TimeScale) -> tuple[float, Detail]:
    """Return a width for the number of a typical block, if that is possible, and how blocks are drawn on it."""
    program = lanes[0].timeline.program
    typical_s = typical_block_s(list({id(lane.timeline): lane.timeline for lane in lanes}.values()))
    block_width = DIGIT_ROOM * max(longest_number(program), 2)
    width = float(np.clip(block_width * scale.end_s / max(typical_s, 1e-12), MIN_WIDTH, MAX_WIDTH))
    detail = choose_detail(lanes, scale.end_s, width)
    return (MERGED_WIDTH if detail is Detail.MERGED else width), detail


def _draw_named_lanes(axes: Any, lanes: list[Lane], scale: TimeScale, sheet: Sheet, detail: Detail) -> None:
    axes.set_xlim(0, 1.01 * scale.end)
    axes.set_ylim(0, int(lanes[0].bottom) + 1)
    axes.spines["left"].set_visible(False)
    draw_lanes(axes, lanes, scale, sheet, detail)
    # A merged picture sets limits of its own.
    axes.set_xlim(0, 1.01 * scale.end)
    axes.set_ylim(0, int(lanes[0].bottom) + 1)
    name_ranks(axes, lanes, sheet)
