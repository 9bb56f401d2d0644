"""The picture of step time against memory as SVG or PNG, drawn by matplotlib from `pareto.lay_out`."""

from collections.abc import Sequence
from typing import Any

from penstock.show.labels import line_end
from penstock.show.palette import Theme, find_theme
from penstock.show.pareto import (
    FONT_SIZE,
    HEIGHT,
    LINE_HEIGHT,
    PLOT,
    RADIUS,
    WIDTH,
    Candidate,
    Caption,
    Mark,
    Pareto,
    lay_out,
)
from penstock.show.sheet import file_of, new_figure

PIXELS_PER_INCH = 96
POINTS = 72 / PIXELS_PER_INCH
"""Of a CSS pixel."""
LONGEST_TITLE = 70
LONGEST_NOTE = 135
"""Characters that fit above the plot at full size."""


def pareto_chart(
    candidates: Sequence[Candidate], caption: Caption, *, format: str = "svg", theme: str = "light"
) -> bytes:
    """Draw step time against memory.

    Raises:
        ConfigError: for no candidates, an unknown format or theme, or if matplotlib is not installed.
    """
    picture = lay_out(candidates, caption)
    colours = find_theme(theme)
    figure = new_figure(WIDTH / PIXELS_PER_INCH, HEIGHT / PIXELS_PER_INCH, colours, format)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    axes.axis("off")
    _draw_axes(axes, picture, colours)
    axes.plot(
        [x for x, _ in picture.front], [y for _, y in picture.front], color=colours.ranks[1], linewidth=1.6, zorder=2
    )
    for mark in picture.marks:
        _draw_mark(axes, mark, colours)
    title_size = min(17.0, 17.0 * LONGEST_TITLE / max(len(caption.title), 1))
    _write(axes, PLOT.left, 34, caption.title, colours.ink, size=title_size, weight="bold")
    for number, note in enumerate(picture.notes(caption)):
        _write(axes, PLOT.left, 60 + 20 * number, note, colours.faint, size=min(12.5, 12.5 * LONGEST_NOTE / len(note)))
    return file_of(figure, format)


def _draw_axes(axes: Any, picture: Pareto, colours: Theme) -> None:
    for tick in picture.x_ticks:
        axes.plot([tick.at, tick.at], [PLOT.top, PLOT.bottom], color=colours.line, linewidth=0.7, zorder=0)
        _write(axes, tick.at, PLOT.bottom + 14, tick.text, colours.ink, size=11, ha="center")
    for tick in picture.y_ticks:
        axes.plot([PLOT.left, PLOT.right], [tick.at, tick.at], color=colours.line, linewidth=0.7, zorder=0)
        _write(axes, PLOT.left - 8, tick.at, tick.text, colours.ink, size=11, ha="right")
    _write(axes, (PLOT.left + PLOT.right) / 2, HEIGHT - 24, picture.x_name, colours.ink, size=12.5, ha="center")
    _write(axes, 24, (PLOT.top + PLOT.bottom) / 2, picture.y_name, colours.ink, size=12.5, ha="center", rotation=90)


def _draw_mark(axes: Any, mark: Mark, colours: Theme) -> None:
    best = mark.is_on_front
    axes.plot(
        [mark.x], [mark.y], marker="o", markersize=2 * RADIUS * POINTS, zorder=4 if best else 3,
        markerfacecolor=colours.ranks[1] if best else colours.bubble,
        markeredgecolor=colours.ranks[1] if best else colours.faint, markeredgewidth=1.0,
    )  # fmt: skip
    if mark.label is None:
        return
    box = mark.label.box
    if mark.label.has_line:
        x, y = line_end(mark.name, box)
        axes.plot([mark.x, x], [mark.y, y], color=colours.faint, linewidth=0.6, zorder=1)
    ink = colours.ink if best else colours.faint
    for number, line in enumerate(mark.lines):
        middle = box.top + (number + 0.5) * LINE_HEIGHT
        _write(axes, mark.label.anchor, middle, line, ink, ha=mark.label.side)


def _write(axes: Any, x: float, y: float, text: str, colour: str, *, size: float = FONT_SIZE, **style: Any) -> None:
    axes.text(x, y, text, color=colour, fontsize=size * POINTS, va="center", parse_math=False, zorder=5, **style)
