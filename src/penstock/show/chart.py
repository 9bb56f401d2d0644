"""Timelines as pictures, one lane per rank: PNG or SVG, drawn by matplotlib, which is loaded only here and on use.

rank 0  [0][1][2][3]      [0 ] [1 ]      blocks coloured by kind, lighter for a rank's later stages, numbered
rank 1     [0][1][2][0 ][3][1 ]          with their microbatch; a bubble is where the grey lane shows
alive   _/‾‾‾‾‾‾‾‾‾‾\\_______              activations (or bytes) that each rank keeps
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.ir.action import Kind
from penstock.ir.timeline import Timeline
from penstock.show.curve import memory_curves
from penstock.show.text import BYTE_UNITS, format_bytes, format_seconds, format_share, time_unit

# Okabe and Ito's colours, which colour-blind readers can tell apart; all light enough for black numbers.
COLOUR_OF_KIND = {
    Kind.FORWARD: "#56B4E9",
    Kind.BACKWARD: "#E69F00",
    Kind.BACKWARD_INPUT: "#2BB58A",
    Kind.BACKWARD_WEIGHT: "#DE9CC0",
}
NAME_OF_KIND = {
    Kind.FORWARD: "F forward",
    Kind.BACKWARD: "B backward",
    Kind.BACKWARD_INPUT: "I backward, input part",
    Kind.BACKWARD_WEIGHT: "W backward, weight part",
}
BUBBLE, INK, FAINT = "#E9E9EC", "#222222", "#6B6B70"
SUFFIXES = (".png", ".svg")
MAX_NUMBERED_BLOCKS = 3000
MIN_FONT_SIZE, MAX_FONT_SIZE = 5.0, 9.0
DIGIT_WIDTH = 0.62
"""Of a digit, in font sizes, with its share of the margin."""
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 1.05, 1.25, 1.15, 0.6
"""Around the lanes, in inches."""


@dataclass(frozen=True, slots=True)
class _Lane:
    """One horizontal strip of blocks."""

    timeline: Timeline
    rank: int
    bottom: float
    height: float
    paleness: float
    """From 0, full colours, to 1, white."""


def draw_timeline(timeline: Timeline, path: str | Path, *, title: str | None = None) -> None:
    """Draw one timeline, with the memory of each rank below it, into a PNG or SVG file.

    Raises:
        ConfigError: for another suffix, or if matplotlib is not installed.
    """
    file = _checked_path(path)
    num_ranks = timeline.num_ranks
    lanes_height, memory_height = max(0.42 * num_ranks, 0.9), 1.5
    sizes = _Sizes(_lanes_width(timeline), MARGIN_TOP + lanes_height + 0.25 + memory_height + MARGIN_BOTTOM)
    figure = _new_figure(sizes)
    axes = sizes.add_axes(figure, MARGIN_BOTTOM + memory_height + 0.25, lanes_height)
    memory = sizes.add_axes(figure, MARGIN_BOTTOM, memory_height)
    lanes = [_Lane(timeline, rank, num_ranks - 1 - rank + 0.08, 0.84, 0.0) for rank in range(num_ranks)]
    scale = _TimeScale.of(timeline.makespan_s)

    _draw_lanes(axes, lanes, scale, sizes)
    _label_ranks(axes, num_ranks)
    _finish_axes(axes, scale, num_ranks, has_time_labels=False)
    _draw_memory(memory, timeline, scale)
    figures = (
        f"makespan {format_seconds(timeline.makespan_s)}    span {format_seconds(timeline.span_s)}    "
        f"bubble {format_share(timeline.bubble_fraction)}    {_peak_text(timeline)}"
    )
    _add_title(figure, sizes, title or f"{_describe(timeline)}, {timeline.source}", figures)
    _add_legend(figure, sizes, [timeline])
    _save(figure, file)


def draw_overlay(measured: Timeline, predicted: Timeline, path: str | Path) -> None:
    """Draw, rank by rank, the predicted timeline above the measured one on one time axis, into a PNG or SVG file.

    Raises:
        ConfigError: for another suffix, for timelines of different numbers of ranks, or if matplotlib is not installed.
    """
    file = _checked_path(path)
    num_ranks = measured.num_ranks
    if predicted.num_ranks != num_ranks:
        raise ConfigError(
            f"measured on {num_ranks} ranks, predicted for {predicted.num_ranks}; overlay two runs of one program"
        )
    lanes_height = max(0.72 * num_ranks, 1.2)
    sizes = _Sizes(_lanes_width(measured), MARGIN_TOP + lanes_height + MARGIN_BOTTOM)
    figure = _new_figure(sizes)
    axes = sizes.add_axes(figure, MARGIN_BOTTOM, lanes_height)
    lanes = []
    for rank in range(num_ranks):
        bottom = num_ranks - 1 - rank
        lanes.append(_Lane(predicted, rank, bottom + 0.51, 0.39, 0.45))
        lanes.append(_Lane(measured, rank, bottom + 0.09, 0.39, 0.0))
    scale = _TimeScale.of(max(measured.makespan_s, predicted.makespan_s))

    _draw_lanes(axes, lanes, scale, sizes)
    _label_ranks(axes, num_ranks)
    _label_lanes(axes, lanes, scale)
    _finish_axes(axes, scale, num_ranks, has_time_labels=True)
    figures = "    ".join(
        f"{name}: bubble {format_share(timeline.bubble_fraction)}, makespan {format_seconds(timeline.makespan_s)}"
        for name, timeline in (("predicted", predicted), ("measured", measured))
    )
    _add_title(figure, sizes, f"{_describe(measured)}: predicted above measured", figures)
    _add_legend(figure, sizes, [predicted, measured])
    _save(figure, file)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Inches: the lanes' width, and the height of the whole picture."""

    lanes_width: float
    height: float

    @property
    def width(self) -> float:
        return MARGIN_LEFT + self.lanes_width + MARGIN_RIGHT

    def add_axes(self, figure: Any, bottom: float, height: float) -> Any:
        rectangle = (MARGIN_LEFT / self.width, bottom / self.height, self.lanes_width / self.width)
        return figure.add_axes((*rectangle, height / self.height))


@dataclass(frozen=True, slots=True)
class _TimeScale:
    """The axis of time: its unit, and where it ends, in that unit."""

    unit_s: float
    name: str
    end: float

    @classmethod
    def of(cls, end_s: float) -> "_TimeScale":
        unit_s, name = time_unit(end_s)
        return cls(unit_s, name, end_s / unit_s if end_s else 1.0)


def _checked_path(path: str | Path) -> Path:
    file = Path(path)
    if file.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{file.name!r} is no picture; end the name in {' or '.join(SUFFIXES)}")
    return file


def _new_figure(sizes: _Sizes) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("charts need matplotlib; install it with: pip install penstock[plot]") from error
    return Figure(figsize=(sizes.width, sizes.height), dpi=120, facecolor="white")


def _save(figure: Any, file: Path) -> None:
    from matplotlib import rc_context

    # Text stays text, and the same timeline gives the same bytes: no date, no random identifiers.
    metadata = {"Date": None} if file.suffix.lower() == ".svg" else {"Software": None}
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "penstock"}):
        figure.savefig(file, metadata=metadata)


def _lanes_width(timeline: Timeline) -> float:
    """Wide enough for the number of a typical block, between 8 and 15 inches."""
    rows = np.concatenate([timeline.compute_rows(rank) for rank in range(timeline.num_ranks)])
    if not len(rows) or not timeline.makespan_s:
        return 8.0
    typical_s = float(np.median(timeline.end_s[rows] - timeline.start_s[rows]))
    return float(np.clip(0.2 * timeline.makespan_s / max(typical_s, 1e-12), 8.0, 15.0))


def _draw_lanes(axes: Any, lanes: list[_Lane], scale: _TimeScale, sizes: _Sizes) -> None:
    from matplotlib.collections import PolyCollection

    num_blocks = sum(len(lane.timeline.compute_rows(lane.rank)) for lane in lanes)
    points_per_unit = 72 * sizes.lanes_width / (1.01 * scale.end)
    for lane in lanes:
        timeline = lane.timeline
        rows = timeline.compute_rows(lane.rank)
        full = timeline.makespan_s / scale.unit_s
        axes.broken_barh([(0.0, full)], (lane.bottom, lane.height), facecolors=BUBBLE, linewidth=0, zorder=1)
        if not len(rows):
            continue
        left, right = timeline.start_s[rows] / scale.unit_s, timeline.end_s[rows] / scale.unit_s
        low, high = _heights(timeline, rows, lane)
        corners: Any = np.stack([left, low, left, high, right, high, right, low], axis=1).reshape(-1, 4, 2)
        edge = 0.6 if points_per_unit * float(np.median(right - left)) > 4 else 0.0
        colours = _colours(timeline, rows, lane)
        axes.add_collection(
            PolyCollection(
                corners, facecolors=colours, edgecolors="white" if edge else "face", linewidths=edge, zorder=2
            )
        )
        if num_blocks <= MAX_NUMBERED_BLOCKS:
            _number_blocks(axes, timeline, rows, corners, points_per_unit)


def _heights(timeline: Timeline, rows: NDArray[np.int64], lane: _Lane) -> tuple[NDArray[Any], NDArray[Any]]:
    """Lower and upper edge of each block: two joined ones share the lane, the first above."""
    low, high = np.full(len(rows), lane.bottom), np.full(len(rows), lane.bottom + lane.height)
    joined = np.flatnonzero(timeline.program.joined[rows])
    middle = lane.bottom + lane.height / 2
    low[joined] = middle
    high[joined + 1] = middle
    return low, high


def _colours(timeline: Timeline, rows: NDArray[np.int64], lane: _Lane) -> NDArray[np.float64]:
    """[num_rows, 3] the colour of each block: that of its kind, lighter for the later stages of the rank."""
    of_kind = np.array([_rgb(COLOUR_OF_KIND[kind]) for kind in Kind])
    held = np.array(timeline.program.placement.stages_of_rank[lane.rank])
    later = np.searchsorted(held, timeline.program.stage[rows]) / max(len(held) - 1, 1)
    paleness = 1 - (1 - lane.paleness) * (1 - 0.5 * later)
    return np.asarray(1 - (1 - of_kind[timeline.program.op[rows]]) * (1 - paleness[:, None]), np.float64)


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))


def _number_blocks(
    axes: Any, timeline: Timeline, rows: NDArray[np.int64], corners: NDArray[Any], points_per_unit: float
) -> None:
    """Write the microbatch into each block that has room for it."""
    program = timeline.program
    texts = [
        f"{program.microbatch[row]}.{program.slice[row]}" if program.num_slices > 1 else str(program.microbatch[row])
        for row in rows
    ]
    widths = points_per_unit * (corners[:, 2, 0] - corners[:, 0, 0])
    longest = max(len(text) for text in texts)
    size = float(np.clip(np.quantile(widths, 0.1) / (DIGIT_WIDTH * longest), MIN_FONT_SIZE, MAX_FONT_SIZE))
    centres = corners.mean(axis=1)
    for text, width, (across, up) in zip(texts, widths, centres, strict=True):
        if width >= DIGIT_WIDTH * size * len(text):
            axes.text(across, up, text, fontsize=size, color=INK, ha="center", va="center_baseline", zorder=3)


def _label_ranks(axes: Any, num_ranks: int) -> None:
    """Name the ranks; of very many only every so many."""
    step = 1 + (num_ranks - 1) // 64
    named = range(0, num_ranks, step)
    axes.set_yticks([num_ranks - 0.5 - rank for rank in named], [f"rank {rank}" for rank in named])


def _label_lanes(axes: Any, lanes: list[_Lane], scale: _TimeScale) -> None:
    """To the right of each lane: which timeline it is, and the rank's share of idle time."""
    for lane in lanes:
        makespan_s = lane.timeline.makespan_s
        idle = 1 - float(lane.timeline.work_s[lane.rank]) / makespan_s if makespan_s else 0.0
        axes.annotate(
            f"{lane.timeline.source}  {format_share(idle)} idle",
            (1.0, lane.bottom + lane.height / 2),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            fontsize=7,
            color=INK if lane.paleness == 0 else FAINT,
            va="center",
        )
        end = makespan_s / scale.unit_s
        axes.plot([end, end], [lane.bottom - 0.02, lane.bottom + lane.height + 0.02], color=INK, linewidth=1, zorder=4)


def _finish_axes(axes: Any, scale: _TimeScale, num_ranks: int, *, has_time_labels: bool) -> None:
    axes.set_xlim(0, 1.01 * scale.end)
    axes.set_ylim(0, num_ranks)
    axes.tick_params(axis="y", length=0, labelsize=9, labelcolor=INK)
    axes.tick_params(axis="x", labelsize=8, color=FAINT, labelcolor=INK, labelbottom=has_time_labels)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    if has_time_labels:
        axes.set_xlabel(f"time ({scale.name})", fontsize=9, color=INK)


def _draw_memory(axes: Any, timeline: Timeline, scale: _TimeScale) -> None:
    """One stepped line per rank; the first ranks dark, the last ones light."""
    curves = memory_curves(timeline)
    in_bytes = curves[0].is_bytes
    largest = max(int(curve.alive.max()) for curve in curves)
    unit, name = _byte_unit(largest) if in_bytes else (1, "activations")
    for rank, curve in enumerate(curves):
        time = np.concatenate([[0.0], curve.time_s / scale.unit_s, [scale.end]])
        alive = np.concatenate([[0], curve.alive, [0]]) / unit
        axes.step(time, alive, where="post", color=_rank_colour(rank, len(curves)), linewidth=1.3, label=f"rank {rank}")
    axes.set_xlim(0, 1.01 * scale.end)
    axes.set_ylim(0, 1.12 * max(largest / unit, 1e-9))
    axes.yaxis.get_major_locator().set_params(integer=not in_bytes, nbins=5)
    axes.set_xlabel(f"time ({scale.name})", fontsize=9, color=INK)
    axes.set_ylabel(f"alive\n({name})", fontsize=9, color=INK)
    axes.tick_params(labelsize=8, color=FAINT, labelcolor=INK)
    axes.grid(axis="y", color=BUBBLE, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if len(curves) <= 10:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=7, handlelength=1.2)


def _byte_unit(size_bytes: int) -> tuple[int, str]:
    return next((unit for unit in BYTE_UNITS if size_bytes >= unit[0]), (1, "B"))


def _rank_colour(rank: int, num_ranks: int) -> tuple[float, ...]:
    """From dark blue over green to orange, so that neighbours are near each other and still distinct."""
    stops = np.array([_rgb("#0B3C68"), _rgb("#0072B2"), _rgb("#009E73"), _rgb("#E69F00")])
    place = rank / max(num_ranks - 1, 1) * (len(stops) - 1)
    return tuple(float(np.interp(place, range(len(stops)), stops[:, channel])) for channel in range(3))


def _describe(timeline: Timeline) -> str:
    program = timeline.program
    parts = [program.name, _count(program.num_ranks, "rank")]
    if program.num_stages != program.num_ranks:
        parts.append(_count(program.num_stages, "stage"))
    parts.append(_count(program.num_microbatches, "microbatch"))
    return ", ".join(parts)


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def _peak_text(timeline: Timeline) -> str:
    peak_bytes = max(timeline.peak_bytes)
    text = f"peak {_count(max(timeline.peak_activations), 'activation')}"
    return f"{text} ({format_bytes(peak_bytes)})" if peak_bytes else text


def _add_title(figure: Any, sizes: _Sizes, title: str, figures: str) -> None:
    left = MARGIN_LEFT / sizes.width
    figure.text(left, 1 - 0.34 / sizes.height, title, fontsize=13, fontweight="bold", color=INK)
    figure.text(left, 1 - 0.62 / sizes.height, figures, fontsize=10, color=INK)


def _add_legend(figure: Any, sizes: _Sizes, timelines: list[Timeline]) -> None:
    """Below the title: the kinds that occur, and the bubble."""
    from matplotlib.patches import Patch

    used = {int(code) for timeline in timelines for code in np.unique(timeline.program.op[timeline.program.is_compute])}
    entries = [Patch(facecolor=COLOUR_OF_KIND[kind], label=NAME_OF_KIND[kind]) for kind in Kind if kind in used]
    entries.append(Patch(facecolor=BUBBLE, label="bubble"))
    figure.legend(
        handles=entries,
        loc="center left",
        bbox_to_anchor=(MARGIN_LEFT / sizes.width, 1 - 0.9 / sizes.height),
        ncols=len(entries),
        frameon=False,
        fontsize=8.5,
        borderpad=0,
        borderaxespad=0,
        handlelength=1.2,
        handleheight=1.0,
        columnspacing=1.6,
    )
