"""The picture of step time against memory as a self-contained HTML page: `pareto.lay_out` as SVG, with hover."""

from collections.abc import Sequence
from html import escape

from penstock.show.html import fill, read, style_of_themes
from penstock.show.labels import line_end
from penstock.show.palette import find_theme
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
from penstock.show.text import format_bytes, format_seconds

ANCHOR_OF_SIDE = {"left": "start", "center": "middle", "right": "end"}


def pareto_page(candidates: Sequence[Candidate], caption: Caption, *, theme: str | None = None) -> bytes:
    """Return a page that shows step time against memory; without a theme it follows the reader's browser.

    Raises:
        ConfigError: for no candidates or an unknown theme.
    """
    picture = lay_out(candidates, caption)
    marks = sorted(picture.marks, key=lambda mark: mark.is_on_front)
    drawing = [*_axes(picture), _front(picture), *(_mark(mark, caption) for mark in marks)]
    return fill(
        "pareto.html",
        attributes=f' data-theme="{find_theme(theme).name}"' if theme else "",
        title=escape(caption.title),
        note=escape("; ".join(picture.notes(caption))),
        style="\n".join([*style_of_themes(), read("pareto.css")]),
        view=f"0 {PLOT.top - 12:g} {WIDTH:g} {HEIGHT - PLOT.top + 12:g}",
        font_size=f"{FONT_SIZE:g}",
        drawing="\n".join(drawing),
    ).encode()


def _axes(picture: Pareto) -> list[str]:
    lines = []
    for tick in picture.x_ticks:
        lines.append(f'<path class="grid" d="M{tick.at:g} {PLOT.top:g}V{PLOT.bottom:g}"/>')
        lines.append(_text(tick.at, PLOT.bottom + 14, tick.text, "middle"))
    for tick in picture.y_ticks:
        lines.append(f'<path class="grid" d="M{PLOT.left:g} {tick.at:g}H{PLOT.right:g}"/>')
        lines.append(_text(PLOT.left - 8, tick.at, tick.text, "end"))
    x, y = (PLOT.left + PLOT.right) / 2, (PLOT.top + PLOT.bottom) / 2
    lines.append(_text(x, HEIGHT - 24, picture.x_name, "middle"))
    return [*lines, f'<g transform="rotate(-90 24 {y:g})">{_text(24, y, picture.y_name, "middle")}</g>']


def _front(picture: Pareto) -> str:
    if not picture.front:
        return ""
    return f'<path class="front" d="M{"L".join(f"{x:g} {y:g}" for x, y in picture.front)}"/>'


def _mark(mark: Mark, caption: Caption) -> str:
    parts = [f"<title>{escape(_told(mark, caption))}</title>"]
    if mark.label is not None:
        box = mark.label.box
        if mark.label.has_line:
            x, y = line_end(mark.name, box)
            parts.append(f'<path class="lead" d="M{mark.x:g} {mark.y:g}L{x:g} {y:g}"/>')
        anchor = ANCHOR_OF_SIDE[mark.label.side]
        parts += [
            _text(mark.label.anchor, box.top + (number + 0.5) * LINE_HEIGHT, line, anchor)
            for number, line in enumerate(mark.lines)
        ]
    parts.append(f'<circle cx="{mark.x:g}" cy="{mark.y:g}" r="{RADIUS:g}"/>')
    kind = "best" if mark.is_on_front else "beaten"
    return f'<g class="mark {kind}" tabindex="0">{"".join(parts)}</g>'


def _told(mark: Mark, caption: Caption) -> str:
    names = "\n".join(candidate.label for candidate in mark.candidates)
    first = mark.candidates[0]
    amount = format_bytes(round(first.memory)) if caption.is_bytes else f"{first.memory:.6g}"
    return f"{names}\nstep time {format_seconds(first.step_s)}, {caption.memory_name} {amount}"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
