"""Step time against memory, one point per schedule, and the front of those that no other one beats.

time |  o                        pale: another schedule is no slower and no larger, and better in one of the two
     |  *----.    o
     |       *----------.
     +------------------*-- memory

Where lower bounds are given, the area below them is grey: no schedule can be there.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.show.names import GAP, POINT_RADIUS, place_names
from penstock.show.palette import THEMES, Theme, find_theme, style_of_themes, variables_of
from penstock.show.sheet import Sheet
from penstock.show.text import count_of, format_seconds, time_unit

Floats = NDArray[np.float64]

WIDTH, HEIGHT, TOP, BOTTOM = 8.2, 6.25, 0.95, 0.75
"""The plot's width, the picture's height, and the room above and below the plot, in inches."""
LOGARITHMIC_ABOVE = 5.0
"""The largest value, in smallest ones, above which an axis is logarithmic."""
MAX_LINES = 5
"""The most lines of names beside a point, which schedules with equal figures share."""
HOW_TO_READ = "the line is the front: every schedule off it is beaten by one on it"
GREY_TO_READ = "no schedule can be in the grey area, below the lower bound"
PAGE = """<!DOCTYPE html>
<html lang="en"{attributes}>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
{themes}
body {{ margin: 0; background: var(--background); }}
svg {{ display: block; width: 100%; height: auto; max-height: 92vh; }}
table {{ margin: 0 auto 3rem; border-collapse: collapse; font: 14px system-ui, sans-serif; color: var(--ink); }}
th {{ text-align: left; color: var(--faint); font-weight: 500; }}
th, td {{ padding: 0.35rem 1.2rem; border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }}
.front {{ font-weight: 600; }}
</style>
{svg}
{table}
</html>
"""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The prediction of one schedule, under the costs that all candidates have in common."""

    label: str
    step_s: float
    memory: float
    """The memory of the rank that needs most."""
    is_on_front: bool


@dataclass(frozen=True, slots=True)
class Caption:
    """The title of the picture, and the names of its numbers."""

    title: str
    memory_name: str
    warning: str = ""
    """The differences between candidates that should have none."""
    time_name: str = "step time"


@dataclass(frozen=True, slots=True)
class LowerBound:
    """The least time of every schedule that holds no more than this memory."""

    memory: float
    step_s: float


_Point = Sequence[Candidate]
"""Candidates with the same figures."""


def pareto_picture(
    candidates: Sequence[Candidate],
    caption: Caption,
    *,
    bounds: Sequence[LowerBound] = (),
    format: str = "svg",
    theme: str | None = None,
) -> bytes:
    """Draw step time against memory, a point per schedule, as `svg`, `png`, or `html`: a page around the SVG.

    No order is faster with less memory than `bounds`, so the area below them is grey. SVG shows all names and figures
    of a point under a pointer. Without a theme a page follows the reader's browser, and the other formats are light.

    Raises:
        ConfigError: for no candidates, an unknown format or theme, or if matplotlib is not installed.
    """
    if not candidates:
        raise ConfigError("no schedule can be compared; a picture of step time and memory needs at least one")
    points = _points_of(candidates)
    unit_s, unit = time_unit(max(candidate.step_s for candidate in candidates))
    positions = np.array([(point[0].memory, point[0].step_s / unit_s) for point in points])
    is_page = format == "html"
    sheet_theme = find_theme(theme or "light")  # also of a page, so that it refuses an unknown theme
    sheet = Sheet.of(WIDTH, HEIGHT, THEMES["light"] if is_page else sheet_theme, "svg" if is_page else format)
    axes = sheet.add_axes(BOTTOM, HEIGHT - TOP - BOTTOM)
    scale_axis(axes, "x", positions[:, 0])
    scale_axis(axes, "y", np.append(positions[:, 1], [bound.step_s / unit_s for bound in bounds]))
    axes.margins(0.08, 0.12)
    axes.grid(color=sheet.theme.line, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_xlabel(caption.memory_name, fontsize=9.5, color=sheet.theme.ink)
    axes.set_ylabel(f"{caption.time_name} ({unit})", fontsize=9.5, color=sheet.theme.ink)
    lines = [_draw_points(axes, points, positions, sheet.theme)]
    lines += [_draw_bounds(axes, bounds, unit_s, sheet.theme)] if bounds else []
    num_nameless = _write_names(sheet, axes, points, positions, lines)
    notes = [HOW_TO_READ, GREY_TO_READ * bool(bounds)]
    notes.append(f"{count_of(num_nameless, 'name')} left out" if num_nameless else "")
    sheet.write(caption.title, 0.3, size=13, is_bold=True)
    sheet.write("; ".join(filter(None, notes)), 0.55, size=8.5, is_faint=True)
    sheet.write(caption.warning, 0.75, size=8.5, is_faint=True)
    picture = sheet.to_bytes()
    if format == "png":
        return picture
    svg = _with_titles(picture.decode(), points, caption)
    return (page_of(svg, caption.title, theme, _table_of_candidates(candidates, caption)) if is_page else svg).encode()


def _points_of(candidates: Sequence[Candidate]) -> list[_Point]:
    """Return the points, those of the front first, then from the fastest on."""
    points_by_figures: dict[tuple[str, str], list[Candidate]] = {}
    front_first = sorted(candidates, key=lambda row: (not row.is_on_front, row.step_s, row.memory))
    for candidate in front_first:
        points_by_figures.setdefault((f"{candidate.memory:.6g}", f"{candidate.step_s:.6g}"), []).append(candidate)
    return list(points_by_figures.values())


def scale_axis(axes: Any, name: str, values: Floats) -> None:
    """Scale the axis `x` or `y` by factors where its values are far apart; label it with plain figures."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    axis = getattr(axes, f"{name}axis")
    if values.min() > 0 and values.max() / values.min() > LOGARITHMIC_ABOVE:
        axes.set(**{f"{name}scale": "log"})
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_locator(MaxNLocator(nbins=7, steps=(1, 2, 5, 10)))
    axis.set_major_formatter("{x:g}")


def _draw_points(axes: Any, points: Sequence[_Point], places: Floats, theme: Theme) -> Floats:
    """Draw the points, and the front as a staircase; return its corners."""
    front = np.array(
        sorted(place for place, point in zip(places.tolist(), points, strict=True) if point[0].is_on_front)
    )
    corners = np.empty((0, 2))
    if len(front):
        corners = np.column_stack([np.repeat(front[:, 0], 2)[1:], np.repeat(front[:, 1], 2)[:-1]])
        axes.plot(*corners.T, color=theme.ranks[1], linewidth=1.6)
    for index, (point, place) in enumerate(zip(points, places, strict=True)):
        best = point[0].is_on_front
        axes.plot(
            *place, "o", gid=f"point-{index}", markersize=2 * POINT_RADIUS, zorder=4 if best else 3,
            markerfacecolor=theme.ranks[1] if best else theme.bubble,
            markeredgecolor=theme.ranks[1] if best else theme.faint,
        )  # fmt: skip
    axes.autoscale_view()  # else limits would be those of empty axes until the picture is drawn
    return corners


def _draw_bounds(axes: Any, bounds: Sequence[LowerBound], unit_s: float, theme: Theme) -> Floats:
    """Fill the area below the bounds, and return its corners. Between two memories the bound of the larger holds."""
    x_min = axes.get_xlim()[0]
    axes.set_xlim(axes.get_xlim())  # else the axis would go on to the largest memory
    sorted_bounds = sorted(bounds, key=lambda bound: bound.memory)
    edges = np.array([x_min, *(bound.memory for bound in sorted_bounds)])
    bound_memory = np.repeat(edges, 2)[1:-1]
    bound_time = np.repeat([bound.step_s / unit_s for bound in sorted_bounds], 2)
    axes.plot(bound_memory, bound_time, color=theme.faint, linewidth=1, linestyle="--", zorder=2, gid="bound")
    axes.set_ylim(axes.get_ylim())
    axes.fill_between(bound_memory, bound_time, axes.get_ylim()[0], color=theme.bubble, linewidth=0, zorder=0)
    return np.column_stack([bound_memory, bound_time])


def _write_names(sheet: Sheet, axes: Any, points: Sequence[_Point], places: Floats, lines: Sequence[Floats]) -> int:
    """Write names beside their points where there is room, apart from the lines; return how many names are left out.

    `places` [num_points, 2] are in the units of the axes, and `lines` are corners of lines that names must not
    cross. Names are placed in points of 1/72 inch.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(sheet.figure)
    renderer, scale = canvas.get_renderer(), 72 / sheet.figure.dpi
    inks = [sheet.theme.ink if point[0].is_on_front else sheet.theme.faint for point in points]
    style = {"textcoords": "offset points", "fontsize": 8.5, "parse_math": False}
    # Write all names first: matplotlib knows the size of a text only once it is written.
    names = [
        axes.annotate(_text_beside(point), place, (0, 0), color=ink, **style)
        for point, place, ink in zip(points, places, inks, strict=True)
    ]
    sizes = np.array([name.get_window_extent(renderer).size for name in names]) * scale
    line_boxes = np.vstack([_segment_boxes(axes.transData.transform(corners) * scale) for corners in lines])
    x_min, y_min, _, y_max = axes.get_window_extent(renderer).extents * scale
    room = np.array([x_min, y_min, 72 * sheet.width, y_max])
    positions = place_names(axes.transData.transform(places) * scale, sizes, line_boxes, room)
    for index, (name, position) in enumerate(zip(names, positions, strict=True)):
        name.set_gid(f"name-{index}")
        if position is None:
            name.remove()
            continue
        across, up = round(np.sign(position.right)), round(np.sign(position.up))
        alignment = {"ha": ("center", "left", "right")[across], "va": ("center", "bottom", "top")[up]}
        name.set(position=(position.right, position.up), **alignment)
        if position.has_line:
            line = {"arrowstyle": "-", "color": sheet.theme.faint, "linewidth": 0.6, "shrinkA": GAP, "shrinkB": 0}
            axes.annotate("", name.xy, name.get_position(), arrowprops=line, zorder=1, **style)
    return sum(len(point) for point, position in zip(points, positions, strict=True) if position is None)


def _segment_boxes(corners: Floats) -> Floats:
    """Return the boxes [left, bottom, right, top] of a line's segments, with a margin of 1/72 inch."""
    return np.hstack([np.minimum(corners[:-1], corners[1:]) - 1, np.maximum(corners[:-1], corners[1:]) + 1])


def _text_beside(point: _Point) -> str:
    names = [candidate.label for candidate in point]
    num_more = len(names) - MAX_LINES
    return "\n".join(names if num_more <= 0 else [*names[: MAX_LINES - 1], f"and {num_more + 1} more"])


def _with_titles(svg: str, points: Sequence[_Point], caption: Caption) -> str:
    """Give points and names in an SVG a title with all their figures, which a browser shows under the pointer."""

    def with_title(match: re.Match[str]) -> str:
        point = points[int(match[1])]
        names = "\n".join(candidate.label for candidate in point)
        figures = f"{caption.time_name}: {format_seconds(point[0].step_s)}"
        title = f"{names}\n{figures}\n{caption.memory_name}: {point[0].memory:.6g}"
        return f"{match[0]}<title>{escape(title)}</title>"

    return re.sub(r'<g id="(?:point|name)-(\d+)">', with_title, svg)


def _table_of_candidates(candidates: Sequence[Candidate], caption: Caption) -> str:
    """Return the figures as a table, the fastest first; those on the front are bold."""
    rows = [
        f'<tr class="{"front" * candidate.is_on_front}"><td>{escape(candidate.label)}</td>'
        f"<td>{format_seconds(candidate.step_s)}</td><td>{candidate.memory:.6g}</td></tr>"
        for candidate in sorted(candidates, key=lambda candidate: (candidate.step_s, candidate.memory))
    ]
    head = f"<tr><th>schedule</th><th>{caption.time_name}</th><th>{escape(caption.memory_name)}</th></tr>"
    return "\n".join(["<table>", head, *rows, "</table>"])


def page_of(svg: str, title: str, theme: str | None, table: str = "") -> str:
    """Put an SVG of the light theme on a page, a table below it; its colours become variables of the page's themes."""
    drawing = svg[svg.index("<svg") :]
    for name, colour in variables_of(THEMES["light"]).items():
        drawing = drawing.replace(f": {colour.lower()}", f": var(--{name})")
    attributes = f' data-theme="{theme}"' if theme else ""
    return PAGE.format(
        attributes=attributes, title=escape(title), themes="\n".join(style_of_themes()), svg=drawing, table=table
    )
