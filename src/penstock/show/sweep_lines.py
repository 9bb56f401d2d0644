"""Step time and memory over a size that is swept: one line per schedule, in two panels above each other.

time   |  o---o___          memory |      ___o
       |  *---*---o___             |  o---
       +--------------- size       +--------------- size
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from penstock.errors import ConfigError
from penstock.show.palette import THEMES, find_theme
from penstock.show.pareto import Caption, page_of, scale_axis
from penstock.show.sheet import Sheet
from penstock.show.text import time_unit

WIDTH, HEIGHT, TOP, BOTTOM, GAP = 8.2, 7.6, 0.95, 0.75, 0.35
"""The plots' width, the picture's height, and the room above, below and between the plots, in inches."""
COLORS = ("#0072B2", "#D98200", "#009E73", "#CC79A7")
"""Colors of lines, told apart with any common kind of color blindness, and on a light and a dark page."""
MAX_TICKS = 10
DASHES = ("-", "--", ":", "-.")
MARKERS = "osD^vP"
DASH = 6.0
"""The length of a dash where equal lines take turns, in line widths."""


@dataclass(frozen=True, slots=True)
class SweptPoint:
    """The prediction of a schedule at one size."""

    size: int
    step_s: float
    memory: float


def sweep_picture(
    lines: Mapping[str, Sequence[SweptPoint]],
    size_name: str,
    caption: Caption,
    *,
    format: str = "svg",
    theme: str | None = None,
) -> bytes:
    """Draw step time and memory over a swept size, a line per schedule, as `svg`, `png`, or an `html` page.

    `lines` are the points of each schedule by its name, and `size_name` is what was swept, such as microbatches.

    Raises:
        ConfigError: for no points, an unknown format or theme, or if matplotlib is not installed.
    """
    points = [point for line in lines.values() for point in line]
    if not points:
        raise ConfigError("no schedule can be compared; a picture of step time and memory needs at least one")
    is_page = format == "html"
    sheet_theme = find_theme(theme or "light")  # also of a page, so that it refuses an unknown theme
    sheet = Sheet.of(WIDTH, HEIGHT, THEMES["light"] if is_page else sheet_theme, "svg" if is_page else format)
    unit_s, unit = time_unit(max(point.step_s for point in points))
    height = (HEIGHT - TOP - BOTTOM - GAP) / 2
    memory = _panel(sheet, BOTTOM, height, lines, lambda point: point.memory)
    time = _panel(sheet, BOTTOM + height + GAP, height, lines, lambda point: point.step_s / unit_s)
    for axes, name in ((time, f"step time ({unit})"), (memory, caption.memory_name.replace(", ", ",\n"))):
        axes.set_ylabel(name, fontsize=8.5, color=sheet.theme.ink)
    time.tick_params(labelbottom=False)
    memory.set_xlabel(size_name, fontsize=9.5, color=sheet.theme.ink)
    time.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8, frameon=False, labelcolor=sheet.theme.ink)
    sheet.write(caption.title, 0.3, size=13, is_bold=True)
    sheet.write(caption.warning, 0.55, size=8.5, is_faint=True)
    picture = sheet.to_bytes()
    return page_of(picture.decode(), caption.title, theme).encode() if is_page else picture


def _panel(
    sheet: Sheet,
    bottom: float,
    height: float,
    lines: Mapping[str, Sequence[SweptPoint]],
    value: Callable[[SweptPoint], float],
) -> Any:
    """Draw one panel: over the sizes, the `value` of each schedule's points as a line; return the axes.

    `bottom` and `height` are inches.
    """
    axes = sheet.add_axes(bottom, height)
    values_of_lines = [[(point.size, value(point)) for point in line] for line in lines.values()]
    size_values = list(chain.from_iterable(values_of_lines))
    for name, values in zip("xy", np.array(size_values, np.float64).T, strict=True):
        scale_axis(axes, name, values)
    for index, (name, line) in enumerate(zip(lines, values_of_lines, strict=True)):
        round_of_colors, color = divmod(index, len(COLORS))
        num_equal, index_of_equal = values_of_lines.count(line), values_of_lines[:index].count(line)
        style = DASHES[round_of_colors % len(DASHES)]
        axes.plot(
            *zip(*line, strict=True),
            color=COLORS[color],
            # Lines of equal values take turns, dash by dash, and their markers show around each other.
            linestyle=style if num_equal == 1 else (DASH * index_of_equal, (DASH, DASH * (num_equal - 1))),
            marker=MARKERS[index % len(MARKERS)],
            markersize=4.5 + 3 * (num_equal - 1 - index_of_equal),
            linewidth=1.5,
            # matplotlib leaves names that begin with an underscore out of a legend
            label=f" {name}" if name.startswith("_") else name,
            gid=f"line-{index}",
        )
    sizes = sorted({size for size, _ in size_values})
    if len(sizes) <= MAX_TICKS:
        axes.set_xticks(sizes)
    axes.margins(0.05, 0.1)
    if len({height for _, height in size_values}) == 1:
        axes.set_ylim(0, 1.3 * size_values[0][1])  # else the axis would show 3.8 to 4.2 around a constant 4
    axes.grid(color=sheet.theme.line, linewidth=0.7)
    axes.set_axisbelow(True)
    return axes
