"""Writing what each step was like: to the terminal, as JSON lines, for TensorBoard and W&B."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median, median_high
from typing import Any, TextIO

import orjson

from penstock.errors import FormatError
from penstock.files import naming_storage
from penstock.train.folder.run_folder import METRICS, TENSORBOARD
from penstock.train.settings.sections import MetricsSection
from penstock.train.watching.progress import SECONDS_BETWEEN_LINES, Pace, StepMetrics, open_display, write_line
from penstock.train.watching.sinks import Sink, open_jsonl, open_tensorboard, open_wandb
from penstock.train.watching.utilization import Utilization

NUM_RECENT_STEPS = 20
PEAK_BYTES = "peak_bytes_rank"
"""The name of a rank's peak bytes, up to the rank's number."""
ROW_BEGIN = b'{"step":'
"""The first bytes of every line of a `metrics.jsonl`."""


class MetricsWriter:
    """Writes every step to the sinks that the configuration asks for, on one rank; they end with a stack.

    Files: `metrics.jsonl` and `tensorboard/` in `folder`. They are only appended to: for a step that a run which was
    interrupted has written, too, the last line counts. `first_step` is the first that is written now. Lines for people
    go to `output`. `utilization` is None where the devices' peak is not known.

    Raises:
        ConfigError: TensorBoard is asked for but not installed.
        PenstockError: a file cannot be written (disk full, no permission): path and reason.
    """

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        options: MetricsSection,
        *,
        num_steps: int,
        output: TextIO,
        first_step: int = 1,
        utilization: Utilization | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the sinks (files and services for metrics) that `options` name. `clock` returns seconds."""
        self._folder = folder
        self._options = options
        self._num_steps = num_steps
        self._first_step = first_step
        self._output = output
        self._clock = clock
        self._shown_at_s = -math.inf
        """When a line of progress was written last, by `clock`."""
        # Figures that stand beside those of each step, as far as they are known.
        self._utilization = utilization
        self._bubble_fraction: float | None = None
        self._peak_bytes: Sequence[int] = ()
        # The last steps, over which the pace is averaged.
        self._recent: deque[StepMetrics] = deque(maxlen=NUM_RECENT_STEPS)
        with naming_storage(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._sinks = [stack.enter_context(sink) for sink in self._wanted_sinks()]
        self._display = stack.enter_context(open_display(output, num_steps))

    def write(self, metrics: StepMetrics) -> None:
        """Write one finished step; the files have it when this returns (TensorBoard within seconds)."""
        pace = self._pace(metrics)
        numbers = _numbers(metrics, pace)
        for sink in self._sinks:
            sink(metrics.step, numbers)
        is_shown = self._is_shown(metrics)
        self._display.show(self._with_last_measured(metrics), pace, stays=is_shown)
        if is_shown:
            self._shown_at_s = self._clock()

    def say(self, line: str) -> None:
        """Show people a line at once."""
        self._display.say(line)

    def _wanted_sinks(self) -> Iterator[AbstractContextManager[Sink]]:
        if self._options.tensorboard:  # first: where it is missing, nothing has been made yet
            yield open_tensorboard(self._folder / TENSORBOARD, self._first_step)
        if self._options.jsonl:
            yield open_jsonl(self._folder / METRICS)
        if self._options.wandb != "off":
            yield open_wandb(self._folder, self._options, partial(write_line, self._output))

    def _pace(self, metrics: StepMetrics) -> Pace:
        """Return the pace of the run: each remaining step is expected to take the median of the last steps.

        Recording and profiling take time, so such a step counts only where there is no other. Compiling takes far more,
        so such a step says nothing of how long the rest takes.
        """
        if not (metrics.is_slowed or metrics.has_compiled):
            self._recent.append(metrics)
        recent, num_left = self._recent or [metrics], self._num_steps - metrics.step
        left_s = num_left * median_high([recent_step.duration_s for recent_step in recent])
        is_known = self._recent or not (metrics.has_compiled and num_left)
        tokens_per_s = median([recent_step.tokens_per_s for recent_step in recent])
        share = None if self._utilization is None else self._utilization.share(tokens_per_s)
        return Pace(tokens_per_s, left_s if is_known else None, share)

    def _with_last_measured(self, metrics: StepMetrics) -> StepMetrics:
        """Return what people see: the last measured bubble and memory; the files hold them where they were measured."""
        if metrics.bubble_fraction is not None:
            self._bubble_fraction = metrics.bubble_fraction
        self._peak_bytes = metrics.peak_bytes or self._peak_bytes
        return replace(metrics, bubble_fraction=self._bubble_fraction, peak_bytes=self._peak_bytes)

    def _is_shown(self, metrics: StepMetrics) -> bool:
        every = self._options.every
        is_late = self._clock() - self._shown_at_s >= SECONDS_BETWEEN_LINES and not self._output.isatty()
        is_due = metrics.step % every == 0 if every else is_late
        return is_due or metrics.step in (self._first_step, self._num_steps) or metrics.held_out_loss is not None


def _numbers(metrics: StepMetrics, pace: Pace) -> dict[str, float]:
    outcome = metrics.outcome
    numbers = {
        "loss": outcome.loss,
        "num_tokens": metrics.num_tokens,
        "tokens_per_s": pace.tokens_per_s,
        "duration_s": metrics.duration_s,
        "data_wait_s": outcome.data_wait_s,
        "learning_rate": outcome.learning_rate,
        "gradient_norm": outcome.gradient_norm,
        "left_s": pace.left_s,
        "model_flops_utilization": pace.utilization,
        "bubble_fraction": metrics.bubble_fraction,
        "predicted_bubble_fraction": metrics.predicted_bubble_fraction,
        "held_out_loss": metrics.held_out_loss,
        "loss_scale": outcome.loss_scale,
        "num_skipped": metrics.num_skipped or None,
    }
    memory = {f"{PEAK_BYTES}{rank}": size for rank, size in enumerate(metrics.peak_bytes)}
    return {name: value for name, value in numbers.items() if value is not None} | memory


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the numbers of every step of a `metrics.jsonl`, in their order: of a step written twice, the last line.

    A number that was not finite, which JSON does not have, is left out; and so is a line that was not written whole.

    Raises:
        OSError: the file cannot be read.
        FormatError: a line is not of such a file.
    """
    rows: dict[int, dict[str, float]] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if _is_cut_off(line):
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            row = None
        if not _is_row(row):
            raise FormatError("not the numbers of a step; remove the line", file=str(path), line=number)
        rows[row["step"]] = {key: value for key, value in row.items() if value is not None}
    return [rows[step] for step in sorted(rows)]


def _is_cut_off(line: bytes) -> bool:
    """Whether a process was killed while it wrote this line."""
    return line.startswith(ROW_BEGIN[: len(line)]) and not line.endswith(b"}")


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return False
    return all(value is None or isinstance(value, int | float) for value in row.values())
