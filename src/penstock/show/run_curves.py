"""Curves of several runs in one picture: the loss over the steps above, the tokens per second below.

A marked line is the held-out loss. Losses of single steps jump, so a line without marks is their running mean; they
themselves are pale. Of runs that follow each other, the color and the dash differ, so that equal curves show both.
The legend is below the plots: it has the settings of a run, and covers no curve.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.show.palette import find_theme
from penstock.show.sheet import Sheet

WIDTH = 8.2
TOP, GAP, BOTTOM = 0.75, 0.35, 0.8
LOSS_HEIGHT, SPEED_HEIGHT = 3.3, 1.4
LEGEND_ROW, HANDLE = 0.21, 0.8
"""The height of a legend's row and the length of its lines, in inches, as all lengths above."""
LEGEND_SIZE = 8.5
"""The font size of the legend, in points."""
LETTER = 0.56
"""Width of a letter of the legend, as a share of its size."""
MEANS_PER_CURVE = 40
"""The number of a curve's steps is divided by this for the number of steps that a mean is over."""
DASHES: tuple[Any, ...] = ("-", (0, (5, 4)), (0, (1.5, 2)), (0, (7, 2, 1.5, 2)))
"""The dashes of runs' lines; their number and that of the colors have no common divisor: the first 20 runs differ."""
MARKS = "os^D"
"""The marks of runs' held-out losses, hollow and of different sizes, so that those at one place show each other."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RunCurve:
    """The curves of one run: steps, and the numbers of each."""

    name: str
    losses: tuple[Sequence[int], Sequence[float]]
    """Steps and training losses, in nats per token."""
    held_out: tuple[Sequence[int], Sequence[float]]
    tokens_per_s: tuple[Sequence[int], Sequence[float]]
    settings: str = ""
    """The settings that differ among the runs."""

    @property
    def label(self) -> str:
        return f"{self.name}   {self.settings}".rstrip()


def run_curves(runs: Sequence[RunCurve], title: str, *, format: str = "svg", theme: str | None = None) -> bytes:
    """Draw the training runs as `svg` or `png`: losses by step above, and tokens per second below.

    The sheet is measured in inches from the bottom: legend, speed, loss, title.

    Raises:
        ConfigError: no run has a step, an unknown format or theme, or matplotlib is not installed.
    """
    if not any(run.losses[0] for run in runs):
        raise ConfigError("no run has finished a step with metrics.jsonl = true; there is nothing to draw")
    legend_height = LEGEND_ROW * len(runs)
    bottom = legend_height + BOTTOM + SPEED_HEIGHT + GAP
    sheet = Sheet.of(WIDTH, bottom + LOSS_HEIGHT + TOP, find_theme(theme or "light"), format)
    loss, speed = sheet.add_axes(bottom, LOSS_HEIGHT), sheet.add_axes(legend_height + BOTTOM, SPEED_HEIGHT)
    for number, run in enumerate(runs):
        _draw_run(loss, speed, run, number, sheet)
    for axes, name in ((loss, "loss (nats per token)"), (speed, "tokens per second")):
        axes.grid(color=sheet.theme.line, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.set_ylabel(name, fontsize=9.5, color=sheet.theme.ink)
    loss.sharex(speed)
    loss.tick_params(labelbottom=False)
    speed.set_ylim(0, 1.05 * speed.get_ylim()[1])
    speed.set_xlabel("step", fontsize=9.5, color=sheet.theme.ink)
    _add_legend(sheet, loss, [run.label for run in runs])
    sheet.write(title, 0.3, size=13, is_bold=True)
    sheet.write("line: running mean of the loss; marked line: held-out loss", 0.55, size=8.5, is_faint=True)
    return sheet.to_bytes()


def _draw_run(loss: Any, speed: Any, run: RunCurve, number: int, sheet: Sheet) -> None:
    colour = sheet.theme.runs[number % len(sheet.theme.runs)]
    style = {"color": colour, "linestyle": DASHES[number % len(DASHES)]}
    steps, losses = run.losses
    loss.plot(steps, losses, color=colour, linewidth=0.6, alpha=0.25)
    loss.plot(steps, _running_mean(losses), linewidth=1.6, gid=f"loss-{number}", **style)
    loss.plot(
        *run.held_out,
        linewidth=0.9,
        marker=MARKS[number % len(MARKS)],
        markersize=5 + number % len(MARKS),
        markerfacecolor="none",
        markeredgewidth=1.3,
        gid=f"held-out-{number}",
        **style,
    )
    speed.plot(run.tokens_per_s[0], _running_mean(run.tokens_per_s[1]), linewidth=1.6, **style)


def _add_legend(sheet: Sheet, loss: Any, labels: Sequence[str]) -> None:
    """Write a row for each run below the plots, all so small that the longest one fits."""
    room = 72 * (sheet.width * (1 - sheet.left) - HANDLE)
    legend = sheet.figure.legend(
        [line for line in loss.lines if str(line.get_gid()).startswith("held-out")],
        # matplotlib leaves names that begin with an underscore out of a legend
        [f" {label}" if label.startswith("_") else label for label in labels],
        loc="lower left",
        bbox_to_anchor=(sheet.left, 0.1 / sheet.height),
        frameon=False,
        borderaxespad=0,
        borderpad=0.4,
        fontsize=min(LEGEND_SIZE, room / (LETTER * max(map(len, labels)))),
        labelcolor=sheet.theme.ink,
        handlelength=4,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _running_mean(values: Sequence[float]) -> Floats:
    """Return the mean of each value and those before it, as far back as the window goes."""
    window = max(len(values) // MEANS_PER_CURVE, 1)
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, np.float64))])
    last = np.arange(1, len(values) + 1)
    first = np.maximum(last - window, 0)
    return np.asarray((sums[last] - sums[first]) / (last - first))
