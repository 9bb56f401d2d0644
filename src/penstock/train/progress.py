"""What the terminal shows of a run: one line a step, and a progress bar where it is a terminal."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

MISSING = "-"


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What one optimizer step was like."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean over the counted tokens, in nats per token."""
    num_tokens: int
    duration_s: float
    learning_rate: float
    gradient_norm: float
    """Over all ranks, before clipping."""
    bubble_fraction: float | None = None
    """Measured share of idle time; absent where it was not measured."""
    held_out_loss: float | None = None
    """In nats per token; absent where the step was not evaluated."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.duration_s if self.duration_s > 0 else 0.0


class Display(Protocol):
    """Where lines go."""

    def show(self, line: str, *, step: int) -> None:
        """Show a line; `step` steps are done."""


def step_line(metrics: StepMetrics, *, num_steps: int, left_s: float) -> str:
    """Return one line for people: step, loss, speed, bubble, learning rate, gradient norm, time left."""
    bubble = MISSING if metrics.bubble_fraction is None else f"{metrics.bubble_fraction:.1%}"
    parts = [
        f"step {metrics.step:>{len(str(num_steps))}}/{num_steps}",
        f"loss {metrics.loss:.4f}",
        f"{metrics.tokens_per_s:>7,.0f} tokens/s",
        f"{metrics.duration_s:.3f} s/step",
        f"bubble {bubble:>5}",
        f"lr {metrics.learning_rate:.2e}",
        f"norm {metrics.gradient_norm:.2f}",
        f"left {duration_text(left_s)}",
    ]
    if metrics.held_out_loss is not None:
        parts.append(f"held-out {metrics.held_out_loss:.4f}")
    return "  ".join(parts)


def duration_text(duration_s: float) -> str:
    """Return `1:02:03`, or `2:03` below an hour."""
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def open_display(output: TextIO, num_steps: int) -> AbstractContextManager[Display]:
    """Return a bar with lines above it where `output` is a terminal, else plain lines."""
    return _bar(output, num_steps) if output.isatty() else _lines(output)


@dataclass(frozen=True, slots=True)
class _Lines:
    output: TextIO

    def show(self, line: str, *, step: int) -> None:
        self.output.write(f"{line}\n")
        self.output.flush()


@contextmanager
def _lines(output: TextIO) -> Iterator[Display]:
    yield _Lines(output)


class _Bar:
    def __init__(self, progress: Progress, num_steps: int) -> None:
        self._progress = progress
        self._task = progress.add_task("training", total=num_steps)

    def show(self, line: str, *, step: int) -> None:
        # The terminal wraps a line that is too long; rich would cut it.
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._progress.update(self._task, completed=step)


@contextmanager
def _bar(output: TextIO, num_steps: int) -> Iterator[Display]:
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn())
    # Nothing else may be redirected: the streams of the process belong to the command line.
    progress = Progress(*columns, console=Console(file=output), redirect_stdout=False, redirect_stderr=False)
    with progress:
        yield _Bar(progress, num_steps)
