"""Curves of several runs in one picture: the loss over the steps above, the tokens per second below.

A dot is a held-out loss. Losses of single steps jump, so the line is their running mean; they themselves are pale.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.show.palette import blend, find_theme
from penstock.show.sheet import Sheet

WIDTH, HEIGHT = 8.2, 6.4
TOP, GAP, BOTTOM = 0.75, 0.35, 0.6
SPEED_HEIGHT = 1.4
"""In inches, as are those above."""
MEANS_PER_CURVE = 40
"""A mean is over this part of a curve's steps."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RunCurve:
    """What is drawn of one run: steps and numbers of each."""

    name: str
    losses: tuple[Sequence[int], Sequence[float]]
    """In nats per token."""
    held_out: tuple[Sequence[int], Sequence[float]]
    tokens_per_s: tuple[Sequence[int], Sequence[float]]


def run_curves(runs: Sequence[RunCurve], title: str, *, format: str = "svg", theme: str | None = None) -> bytes:
    """Draw the runs as `svg` or `png`.

    Raises:
        ConfigError: no run has a step, an unknown format or theme, or matplotlib is not installed.
    """
    if not any(run.losses[0] for run in runs):
        raise ConfigError("no run has finished a step with metrics.jsonl = true; there is nothing to draw")
    sheet = Sheet.of(WIDTH, HEIGHT, find_theme(theme or "light"), format)
    low = BOTTOM + SPEED_HEIGHT + GAP
    loss, speed = sheet.add_axes(low, HEIGHT - TOP - low), sheet.add_axes(BOTTOM, SPEED_HEIGHT)
    for number, run in enumerate(runs):
        colour = blend(sheet.theme.ranks, number / max(len(runs) - 1, 1))
        steps, losses = run.losses
        loss.plot(steps, losses, color=colour, linewidth=0.6, alpha=0.25)
        loss.plot(steps, _running_mean(losses), color=colour, linewidth=1.6, label=run.name)
        loss.plot(*run.held_out, "o", color=colour, markersize=4, markeredgecolor=sheet.theme.background)
        speed.plot(run.tokens_per_s[0], _running_mean(run.tokens_per_s[1]), color=colour, linewidth=1.6)
    for axes, name in ((loss, "loss (nats per token)"), (speed, "tokens per second")):
        axes.grid(color=sheet.theme.line, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.set_ylabel(name, fontsize=9.5, color=sheet.theme.ink)
    loss.sharex(speed)
    loss.tick_params(labelbottom=False)
    speed.set_ylim(bottom=0)
    speed.set_xlabel("step", fontsize=9.5, color=sheet.theme.ink)
    loss.legend(frameon=False, fontsize=8.5, labelcolor=sheet.theme.ink)
    sheet.write(title, 0.3, size=13, is_bold=True)
    sheet.write("line: running mean; dot: held-out loss", 0.55, size=8.5, is_faint=True)
    return sheet.to_bytes()


def _running_mean(values: Sequence[float]) -> Floats:
    """Return the mean of each value and those before it, as far back as the window goes."""
    window = max(len(values) // MEANS_PER_CURVE, 1)
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, np.float64))])
    last = np.arange(1, len(values) + 1)
    first = np.maximum(last - window, 0)
    return np.asarray((sums[last] - sums[first]) / (last - first))
