"""The lines that people see of a run: one that is updated in a terminal, and lines that stay."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from penstock.ir.timeline import Timeline
from penstock.show.text import format_bytes
from penstock.tables import NO_SCREEN, Screen

MISSING = "-"
SECONDS_BETWEEN_LINES = 5.0
"""Seconds between two lines where `metrics.every` does not say after how many steps one follows."""
SHOWN_WAIT = 0.02
"""Share of a step, from which on its wait for data is shown."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The outcome of an optimizer step, on every rank alike."""

    loss: float
    """Mean of the pipeline's losses over the batches; of a run, in nats per token."""
    gradient_norm: float | None
    """Norm over all ranks, before clipping; None in a dry run, in which gradients are not reduced over ranks."""
    learning_rate: float
    recorded: Timeline | None = None
    """The last pipeline step as it was measured, if it was to be recorded."""
    named_losses: Mapping[str, float] = field(default_factory=dict)
    """Mean over the batches of every loss that has a name, those that layers add before their weights."""
    is_updated: bool = True
    """Whether the weights were changed; not where a number was not finite, nor in a dry run."""
    loss_scale: float | None = None
    """The factor by which the losses of this step were multiplied; None where they were not."""
    data_wait_s: float = field(default=0.0, compare=False)
    """Seconds that this rank waited for the batches; ranks differ in it, and so do equal steps."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One optimizer step, in numbers."""

    step: int
    """The optimizer step, counted from 1."""
    outcome: StepOutcome
    """The outcome on rank 0."""
    num_tokens: int
    duration_s: float
    bubble_fraction: float | None = None
    """Measured share of idle time; absent where it was not measured."""
    held_out_loss: float | None = None
    """Loss in nats per token; absent where the step was not evaluated."""
    num_skipped: int = 0
    """Steps so far that changed no weight, because a number was not finite."""
    predicted_bubble_fraction: float | None = None
    """The simulator's bubble fraction from the measured costs; absent where nothing was measured."""
    is_slowed: bool = False
    """Whether it was recorded or profiled, which takes time: then it does not count in tokens per second."""
    has_compiled: bool = False
    """Whether rank 0 compiled layers in it: then no other step is expected to take as long."""
    peak_bytes: Sequence[int] = ()
    """The most memory of each rank so far; empty where it was not gathered."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.duration_s if self.duration_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a run is: the middle of its last steps, of which recorded and compiling ones do not count."""

    tokens_per_s: float
    left_s: float | None
    """Seconds until the last step; None as long as every step has compiled."""
    utilization: float | None = None
    """Model FLOPs as a share of what the devices can do; absent where that is not known."""


def write_line(output: TextIO, line: str, end: str = "\n") -> None:
    """Write a line at once, before what it is about takes its time."""
    output.write(f"{line}{end}")
    output.flush()


class ShareLines:
    """Lines that say how much of a long preparation is done, one every few seconds, and none of a short one."""

    def __init__(self, output: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._output = output
        self._clock = clock
        self._told_at_s = clock()

    def tell(self, activity: str, num_done: int, num_all: int) -> None:
        now_s = self._clock()
        if now_s - self._told_at_s >= SECONDS_BETWEEN_LINES:
            self._told_at_s = now_s
            write_line(self._output, f"{activity}: {num_done / max(num_all, 1):.0%}")


def step_line(metrics: StepMetrics, pace: Pace, *, num_steps: int) -> str:
    """Return one line on a step for people, with what matters most first: a narrow terminal cuts its end.

    `pace` has what is averaged over recent steps: tokens per second, time left and MFU.
    """
    outcome = metrics.outcome
    bubble = MISSING if metrics.bubble_fraction is None else f"{metrics.bubble_fraction:.1%}"
    parts = [
        f"step {metrics.step:>{len(str(num_steps))}}/{num_steps}",
        f"loss {outcome.loss:.4f}",
        f"left {MISSING if pace.left_s is None else duration_text(pace.left_s)}",
        f"{pace.tokens_per_s:>7,.0f} tokens/s",
        f"{metrics.duration_s:.3f} s/step",
        f"bubble {bubble:>5}",
        f"lr {outcome.learning_rate:.2e}",
    ]
    if outcome.gradient_norm is not None:
        parts.append(f"norm {outcome.gradient_norm:.2f}")
    if pace.utilization is not None:
        parts.append(f"MFU {pace.utilization:.1%}")
    if metrics.peak_bytes:
        parts.append(f"memory {format_bytes(max(metrics.peak_bytes))}")
    if outcome.data_wait_s >= SHOWN_WAIT * metrics.duration_s > 0:
        parts.append(f"data wait {outcome.data_wait_s:.3f} s")
    if metrics.num_skipped:
        parts.append(f"skipped {metrics.num_skipped}")
    if metrics.predicted_bubble_fraction is not None:
        parts.append(f"recorded: not in tokens/s; predicted bubble {metrics.predicted_bubble_fraction:.1%}")
    if metrics.held_out_loss is not None:
        parts.insert(2, f"held-out {metrics.held_out_loss:.4f}")
    return "  ".join(parts)


def duration_text(duration_s: float) -> str:
    """Return `1:02:03`, or `2:03` below an hour."""
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def screen_of(output: TextIO) -> Screen:
    """Return the width of the terminal that `output` is; none for a pipe or a file."""
    return Screen(Console(file=output).width) if output.isatty() else NO_SCREEN


@dataclass(frozen=True, slots=True)
class Display:
    """The output that lines about a run are written to, and its line that is updated in place."""

    output: TextIO
    num_steps: int
    live: Live | None = None
    """The line of a terminal that is updated in place; a pipe has none, for all that is written to it stays."""

    def show(self, metrics: StepMetrics, pace: Pace, *, stays: bool) -> None:
        """Show the state of the run in place of the last one, where that is possible, and on a line that stays."""
        line = step_line(metrics, pace, num_steps=self.num_steps)
        if self.live is not None:
            self.live.update(Text(line, no_wrap=True, overflow="ellipsis"))
        if stays:
            self.say(line)

    def say(self, line: str) -> None:
        """Show a line that stays, which is not about a finished step."""
        if self.live is None:
            write_line(self.output, line)
        else:
            # The terminal wraps a line that is too long; rich would cut it.
            self.live.console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def open_display(output: TextIO, num_steps: int) -> Iterator[Display]:
    """Show a line that is updated in place, below lines that stay, where `output` is a terminal; else plain lines."""
    if not output.isatty():
        yield Display(output, num_steps)
        return
    # Nothing else may be redirected: the streams of the process belong to the command line.
    console = Console(file=output)
    with Live(console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as live:
        yield Display(output, num_steps, live)
