"""Draws what ranks keep in memory over time: one stepped line for each of a few ranks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.timeline import Timeline
from penstock.show.curve import MemoryCurve, knows_bytes, largest_within, memory_curves, without_spikes
from penstock.show.lanes import TimeScale
from penstock.show.palette import blend
from penstock.show.sheet import DOTS_PER_INCH, Sheet
from penstock.show.text import byte_unit

MAX_CURVES = 8
STEPS_PER_DOT = 0.5
"""The most steps of a curve per dot; finer ones are merged into columns that show the most that was alive in them."""


def draw_memory(axes: Any, timeline: Timeline, scale: TimeScale, sheet: Sheet) -> None:
    """Draw the curves of the ranks, of many only some: the first, the last, the one with the peak, and some between."""
    curves = [without_spikes(curve) for curve in memory_curves(timeline)]
    ranks = chosen_ranks(curves)
    in_bytes = knows_bytes(timeline)
    largest = max(int(curve.alive.max()) for curve in curves)
    unit, name = byte_unit(largest) if in_bytes else (float(timeline.program.parts_per_rank), "microbatches")
    columns = np.linspace(0.0, scale.end_s, int(DOTS_PER_INCH * sheet.inner_width * STEPS_PER_DOT) + 1)
    for rank in ranks:
        time, alive = _steps(curves[rank], columns, scale)
        colour = blend(sheet.theme.ranks, rank / max(len(curves) - 1, 1))
        axes.step(time, alive / unit, where="post", color=colour, linewidth=1.4 * sheet.scale, label=f"rank {rank}")
    _style_axes(axes, scale, sheet, largest / unit, in_bytes=in_bytes)
    axes.set_ylabel(f"alive\n({name})", fontsize=9 * sheet.scale, color=sheet.theme.ink)
    title = "" if len(ranks) == len(curves) else f"{len(ranks)} of {len(curves)} ranks"
    size = 7 * sheet.scale
    legend = axes.legend(
        loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, labelcolor=sheet.theme.ink, labelspacing=0.35,
        handlelength=1.2, fontsize=size, title=title, title_fontproperties={"size": size},
    )  # fmt: skip
    legend.get_title().set_color(sheet.theme.faint)


def chosen_ranks(curves: Sequence[MemoryCurve]) -> list[int]:
    """Return the ranks to draw: all where they are few, else some at equal distances and the one with the peak."""
    if len(curves) <= MAX_CURVES:
        return list(range(len(curves)))
    peaks = [int(curve.alive.max()) for curve in curves]
    spread = np.rint(np.linspace(0, len(curves) - 1, MAX_CURVES - 1)).astype(int).tolist()
    highest = peaks.index(max(peaks))
    return sorted({*spread, highest})


def _steps(
    curve: MemoryCurve, columns: NDArray[np.float64], scale: TimeScale
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the times of a line's steps, in units of the axis, and the heights that it steps to."""
    if len(curve.time_s) > len(columns):
        alive = largest_within(curve, columns)
        return columns / scale.unit_s, np.append(alive, 0.0)
    time = np.concatenate([[0.0], curve.time_s / scale.unit_s, [scale.end]])
    return time, np.concatenate([[0.0], curve.alive, [0.0]])


def _style_axes(axes: Any, scale: TimeScale, sheet: Sheet, largest: float, *, in_bytes: bool) -> None:
    axes.set_xlim(0, 1.01 * scale.end)
    axes.set_ylim(0, 1.12 * max(largest, 1e-9))
    axes.yaxis.get_major_locator().set_params(integer=not in_bytes, nbins=5)
    axes.set_xlabel(f"time ({scale.name})", fontsize=9 * sheet.scale, color=sheet.theme.ink)
    axes.grid(axis="y", color=sheet.theme.line, linewidth=0.8)
    axes.set_axisbelow(True)
