"""Draws lanes of blocks into axes: numbered, plain, or merged into columns where single ones could not be seen."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.action import Kind
from penstock.ir.timeline import Timeline
from penstock.show.bars import COLOURS, FOOT, NAMES, bars_of_rank, merged, window_s
from penstock.show.density import column_edges, density_of, rasterise
from penstock.show.layout import (
    Blocks,
    block_numbers,
    blocks_of_rank,
    longest_number,
    num_blocks,
    num_shades,
    period_s,
    typical_block_s,
)
from penstock.show.palette import block_colours, ink_on, paler, to_rgb
from penstock.show.sheet import DOTS_PER_INCH, Sheet
from penstock.show.text import time_unit

MAX_NUMBERED_BLOCKS = 3000
MAX_DRAWN_BLOCKS = 12_000
"""The most blocks that are drawn one by one: in an SVG, a block takes about 100 bytes and its number 300."""
MIN_BLOCK_DOTS, MIN_COLUMN_DOTS = 1.5, 4.0
LEVELS = 24
"""Levels of a column's height: a share of less than one of them cannot be seen."""
MIN_FONT_SIZE, MAX_FONT_SIZE = 5.5, 9.0
DIGIT_WIDTH = 0.7
"""The width of a digit, in font sizes, with its share of the margin."""


class Detail(Enum):
    """How blocks are drawn."""

    NUMBERED = "numbered"
    PLAIN = "plain"
    MERGED = "merged"


@dataclass(frozen=True, slots=True)
class Lane:
    """One horizontal strip: what one rank does, or the mean of several neighbours."""

    timeline: Timeline
    ranks: range
    bottom: float
    height: float
    paleness: float = 0.0
    """The paleness of its colours, from 0, full colours, to 1, the paper's."""

    @property
    def middle(self) -> float:
        return self.bottom + self.height / 2


@dataclass(frozen=True, slots=True)
class TimeScale:
    """The axis of time: its unit, and where it ends, in that unit."""

    unit_s: float
    name: str
    end: float

    @classmethod
    def of(cls, end_s: float) -> "TimeScale":
        unit_s, name = time_unit(end_s)
        return cls(unit_s, name, end_s / unit_s if end_s else 1.0)

    @property
    def end_s(self) -> float:
        return self.end * self.unit_s

    def points_per_unit(self, sheet: Sheet) -> float:
        """Return how many points of the paper a unit of time takes."""
        return 72 * sheet.inner_width / (1.01 * self.end)


def choose_detail(lanes: Sequence[Lane], end_s: float, inner_width: float) -> Detail:
    """Return how blocks are drawn on lanes that are `inner_width` inches wide and last until `end_s`."""
    timelines = list({id(lane.timeline): lane.timeline for lane in lanes}.values())
    number = num_blocks(timelines)
    dots = DOTS_PER_INCH * inner_width * typical_block_s(timelines) / end_s if end_s else 0.0
    if number > MAX_DRAWN_BLOCKS or dots < MIN_BLOCK_DOTS or any(len(lane.ranks) > 1 for lane in lanes):
        return Detail.MERGED if number else Detail.PLAIN
    room = DIGIT_WIDTH * MIN_FONT_SIZE * max(longest_number(timeline.program) for timeline in timelines)
    has_room = 72 * dots / DOTS_PER_INCH >= room
    return Detail.NUMBERED if has_room and number <= MAX_NUMBERED_BLOCKS else Detail.PLAIN


def columns_for(lanes: Sequence[Lane], end_s: float, inner_width: float) -> NDArray[np.float64]:
    """Return where the columns of merged blocks begin and end."""
    longest = max(period_s(lane.timeline) for lane in lanes)
    return column_edges(end_s, longest, int(DOTS_PER_INCH * inner_width / MIN_COLUMN_DOTS))


def draw_lanes(axes: Any, lanes: Sequence[Lane], scale: TimeScale, sheet: Sheet, detail: Detail) -> None:
    """Draw every lane on a strip that shows where it idles."""
    edges_s = columns_for(lanes, scale.end_s, sheet.inner_width)
    for lane in lanes:
        begin, end = (time_s / scale.unit_s for time_s in window_s(lane.timeline))
        axes.broken_barh(
            [(begin, end - begin)], (lane.bottom, lane.height), facecolors=sheet.theme.bubble, linewidth=0, zorder=1
        )
        if detail is Detail.MERGED:
            _draw_columns(axes, lane, scale, sheet, edges_s)
        else:
            _draw_blocks(axes, lane, scale, sheet, is_numbered=detail is Detail.NUMBERED)
        _draw_bars(axes, lane, scale, sheet)


def _draw_bars(axes: Any, lane: Lane, scale: TimeScale, sheet: Sheet) -> None:
    """Draw the bars of the lane's ranks at its foot; those nearer than a dot become one, so there are at most as many
    bars as dots."""
    dot_s = 72 / DOTS_PER_INCH / scale.points_per_unit(sheet) * scale.unit_s
    bars = [bars_of_rank(lane.timeline, rank) for rank in lane.ranks]
    for sort in range(len(NAMES)):
        start_s = np.concatenate([rank_bars.start_s[rank_bars.sort == sort] for rank_bars in bars])
        end_s = np.concatenate([rank_bars.end_s[rank_bars.sort == sort] for rank_bars in bars])
        if not len(start_s):
            continue
        start_s, end_s = merged(start_s, end_s, dot_s)
        widths_s = np.maximum(end_s - start_s, dot_s)
        axes.broken_barh(
            np.column_stack([start_s, widths_s]) / scale.unit_s,
            (lane.bottom, FOOT * lane.height),
            facecolors=paler(COLOURS.get(sort, sheet.theme.ink), sheet.theme.background, lane.paleness),
            edgecolors=sheet.theme.background,
            linewidth=0.4,
            zorder=3.5,
        )


def _colours(lane: Lane, sheet: Sheet) -> dict[Kind, list[str]]:
    ramps = block_colours(num_shades(lane.timeline.program))
    return {
        kind: [paler(colour, sheet.theme.background, lane.paleness) for colour in ramp] for kind, ramp in ramps.items()
    }


def _draw_blocks(axes: Any, lane: Lane, scale: TimeScale, sheet: Sheet, *, is_numbered: bool) -> None:
    blocks = blocks_of_rank(lane.timeline, lane.ranks[0])
    if not len(blocks):
        return
    corners = _corners(blocks, lane, scale)
    points = scale.points_per_unit(sheet)
    is_wide = points * float(np.median(corners[:, 2, 0] - corners[:, 0, 0])) > 4
    colours = _colours(lane, sheet)
    for kind, shade in sorted(set(zip(blocks.kind.tolist(), blocks.shade.tolist(), strict=True))):
        chosen = corners[(blocks.kind == kind) & (blocks.shade == shade)]
        edge = sheet.theme.background if is_wide else "none"
        _add_rectangles(axes, chosen, facecolor=colours[Kind(kind)][shade], edgecolor=edge, linewidth=0.6, zorder=2)
    firsts = np.flatnonzero(blocks.low > 0)  # of overlapped pairs, each the upper half, which get one frame together
    if is_wide and len(firsts):
        pairs = np.stack([corners[firsts + 1, 0], corners[firsts, 1], corners[firsts, 2], corners[firsts + 1, 3]], 1)
        _add_rectangles(axes, pairs, facecolor="none", edgecolor=sheet.theme.ink, linewidth=0.9, zorder=2.5)
    if is_numbered:
        _number_blocks(axes, lane, blocks, corners, sheet, points=points)


def _add_rectangles(axes: Any, corners: NDArray[np.float64], **style: Any) -> None:
    """Add [num_rectangles, 4, 2] corners as one path, which keeps an SVG small."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    codes = np.tile([Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY], len(corners))
    path = Path(corners[:, [0, 1, 2, 3, 0]].reshape(-1, 2), codes)
    path.should_simplify = False
    axes.add_patch(PathPatch(path, **style))


def _corners(blocks: Blocks, lane: Lane, scale: TimeScale) -> NDArray[np.float64]:
    """Return [num_blocks, 4, 2] the corners of blocks from the lower left on: across in units of time, up in lanes."""
    begin, end = blocks.start_s / scale.unit_s, blocks.end_s / scale.unit_s
    low, high = lane.bottom + lane.height * blocks.low, lane.bottom + lane.height * blocks.high
    return np.stack([begin, low, begin, high, end, high, end, low], axis=1).reshape(-1, 4, 2)


def _number_blocks(
    axes: Any, lane: Lane, blocks: Blocks, corners: NDArray[np.float64], sheet: Sheet, *, points: float
) -> None:
    """Write the microbatch into each block that has room for it; blocks of one size have numbers of one size."""
    texts = block_numbers(lane.timeline.program, blocks)
    longest = max(map(len, texts))
    widths = points * (corners[:, 2, 0] - corners[:, 0, 0])
    heights = 72 * _inches_per_lane(axes) * (corners[:, 1, 1] - corners[:, 0, 1])
    sizes = np.minimum(widths / (DIGIT_WIDTH * longest), 0.8 * heights)
    sizes = np.clip(sizes, MIN_FONT_SIZE, MAX_FONT_SIZE * sheet.scale)
    colours = _colours(lane, sheet)
    centres = corners.mean(axis=1)
    for index, text in enumerate(texts):
        # Rounding makes the widths of equal blocks differ.
        if widths[index] < DIGIT_WIDTH * sizes[index] * len(text) - 0.01 or heights[index] < sizes[index]:
            continue
        axes.text(
            *centres[index], text, fontsize=round(sizes[index], 1), ha="center", va="center_baseline", zorder=3,
            color=ink_on(colours[Kind(int(blocks.kind[index]))][blocks.shade[index]]),
        )  # fmt: skip


def _inches_per_lane(axes: Any) -> float:
    """Return the height of one unit of the vertical axis."""
    low, high = axes.get_ylim()
    return float(axes.get_position().height * axes.figure.get_figheight() / (high - low))


def _draw_columns(axes: Any, lane: Lane, scale: TimeScale, sheet: Sheet, edges_s: NDArray[np.float64]) -> None:
    """Draw a lane of merged blocks as an image of a pixel per column and level."""
    from matplotlib.patches import Rectangle

    category = rasterise(density_of(lane.timeline, edges_s, [lane.ranks]), LEVELS)[0]
    ramps = _colours(lane, sheet)
    table = [to_rgb(colour) for ramp in ramps.values() for colour in ramp]
    picture = np.zeros((*category.shape, 4))
    picture[..., 3] = category >= 0
    picture[..., :3] = np.array(table)[np.maximum(category, 0)]
    extent = (edges_s[0] / scale.unit_s, edges_s[-1] / scale.unit_s, lane.bottom, lane.bottom + lane.height)
    image = axes.imshow(picture, extent=extent, aspect="auto", interpolation="none", zorder=2)
    # The last column may end after the timeline does.
    end = window_s(lane.timeline)[1] / scale.unit_s
    image.set_clip_path(Rectangle((0.0, lane.bottom), end, lane.height, transform=axes.transData))
