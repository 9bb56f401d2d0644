"""A sheet of paper: a matplotlib figure with room for a title above the drawing and for names beside it.

matplotlib is loaded when the first sheet is made, and needed for nothing else.
"""

import re
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from penstock.errors import ConfigError
from penstock.show.palette import Theme

FORMATS = ("svg", "png")
DOTS_PER_INCH = 120
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_BOTTOM = 0.95, 1.45, 0.6
"""The margins around the drawing, in inches of a sheet of scale 1."""
FONTS = b"system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif;"
"""The fonts of an SVG, the reader's own. matplotlib measures in DejaVu Sans, which is wider, so texts have room."""
USUAL_WIDTH, MAX_SCALE = 13.0, 1.8


def scale_of(inner_width: float) -> float:
    """Return how much larger than usual the texts around a drawing are."""
    return min(max(inner_width / USUAL_WIDTH, 1.0), MAX_SCALE)


def load_matplotlib() -> Any:
    """Return matplotlib's class of figures. Raises: ConfigError, if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("charts need matplotlib; pip install '.[plot]' in Penstock's clone") from error
    return Figure


@dataclass(frozen=True, slots=True)
class Sheet:
    """A sheet with its sizes in inches; `inner_width` is the width of the drawing, without its margins.

    A wide sheet is looked at from further away, so `scale` enlarges the texts around the drawing.
    """

    figure: Any
    inner_width: float
    height: float
    theme: Theme
    format: str

    @classmethod
    def of(cls, inner_width: float, height: float, theme: Theme, format: str) -> "Sheet":
        """Take an empty sheet, for a file of this format.

        Raises:
            ConfigError: for a format other than SVG and PNG, or if matplotlib is not installed.
        """
        if format not in FORMATS:
            raise ConfigError(f"unknown format {format!r}; a chart is {' or '.join(FORMATS)}", key="format")
        new_figure = load_matplotlib()
        width = inner_width + scale_of(inner_width) * (MARGIN_LEFT + MARGIN_RIGHT)
        figure = new_figure(figsize=(width, height), dpi=DOTS_PER_INCH, facecolor=theme.background)
        return cls(figure, inner_width, height, theme, format)

    @property
    def scale(self) -> float:
        return scale_of(self.inner_width)

    @property
    def width(self) -> float:
        return self.inner_width + self.scale * (MARGIN_LEFT + MARGIN_RIGHT)

    @property
    def left(self) -> float:
        """The left edge of the drawing, as a share of the width."""
        return self.scale * MARGIN_LEFT / self.width

    def add_axes(self, bottom: float, height: float) -> Any:
        """Add axes as wide as the drawing."""
        axes = self.figure.add_axes(
            (self.left, bottom / self.height, self.inner_width / self.width, height / self.height)
        )
        axes.set_facecolor("none")
        axes.tick_params(labelsize=8 * self.scale, color=self.theme.faint, labelcolor=self.theme.ink)
        for side in ("top", "right", "left", "bottom"):
            axes.spines[side].set_color(self.theme.faint)
            axes.spines[side].set_visible(side in ("left", "bottom"))
        return axes

    def write(self, text: str, below_top: float, *, size: float, is_bold: bool = False, is_faint: bool = False) -> None:
        """Write a line above the drawing, smaller where it would not fit the sheet."""
        room = 72 * (self.width * (1 - self.left) - 0.1)
        width_of_letter = 0.64 if is_bold else 0.56
        self.figure.text(
            self.left,
            1 - self.scale * below_top / self.height,
            text,
            fontsize=min(size * self.scale, room / (width_of_letter * max(len(text), 1))),
            fontweight="bold" if is_bold else "normal",
            color=self.theme.faint if is_faint else self.theme.ink,
            va="center",
            parse_math=False,
        )

    def to_bytes(self) -> bytes:
        """Return the picture as a file: text stays text, and the same drawing gives the same bytes."""
        from matplotlib import rc_context

        buffer = BytesIO()
        metadata = {"Date": None} if self.format == "svg" else {"Software": None}
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "penstock"}):
            self.figure.savefig(buffer, format=self.format, metadata=metadata)
        return re.sub(rb"font-family: 'DejaVu Sans'[^;]*;", b"font-family: " + FONTS, buffer.getvalue())
