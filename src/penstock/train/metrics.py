"""Writing what each step was like: to the terminal, as JSON lines, and for TensorBoard."""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

import orjson

from penstock.errors import ConfigError, FormatError
from penstock.files import naming_storage
from penstock.train.progress import SECONDS_BETWEEN_LINES, Display, StepMetrics, open_display
from penstock.train.run_folder import METRICS, TENSORBOARD
from penstock.train.sections import MetricsSection

__all__ = ["MetricsWriter", "StepMetrics"]

NUM_RECENT_STEPS = 20
ROW_BEGIN = b'{"step":'
"""Of every line of a `metrics.jsonl`, also of one that was cut off."""


class Sink(Protocol):
    """Where numbers go, one set a step."""

    def write(self, step: int, numbers: dict[str, float]) -> None: ...


class MetricsWriter:
    """Writes every step to the sinks that the configuration asks for; use it in a `with` block, on one rank.

    Files: `metrics.jsonl` and `tensorboard/` in `folder`. They are only appended to: for a step that a run which was
    interrupted has written, too, the last line counts. `first_step` is the first that is written now. Lines for people
    go to `output`.

    Raises:
        ConfigError: TensorBoard is asked for but not installed.
        PenstockError: a file cannot be written (disk full, no permission): path and reason.
    """

    def __init__(
        self,
        folder: Path,
        options: MetricsSection,
        *,
        num_steps: int,
        output: TextIO,
        first_step: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._options = options
        self._num_steps = num_steps
        self._first_step = first_step
        self._output = output
        self._clock = clock
        self._shown_at_s = -math.inf
        self._bubble_fraction: float | None = None
        self._recent_s: deque[float] = deque(maxlen=NUM_RECENT_STEPS)
        self._stack = ExitStack()
        self._sinks: list[Sink] = []
        self._display: Display | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            with naming_storage(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
            self._sinks = [stack.enter_context(sink) for sink in self._wanted_sinks()]
            self._display = stack.enter_context(open_display(self._output, self._num_steps))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display = None
        self._stack.__exit__(kind, error, trace)

    def write(self, metrics: StepMetrics) -> None:
        """Write one finished step; the files have it when this returns (TensorBoard within seconds)."""
        assert self._display is not None, "used outside its with block"
        self._recent_s.append(metrics.duration_s)
        left_s = self._left_s(metrics.step)
        numbers = _numbers(metrics, left_s)
        for sink in self._sinks:
            sink.write(metrics.step, numbers)
        if metrics.bubble_fraction is not None:
            self._bubble_fraction = metrics.bubble_fraction
        # People see the last measured bubble on every line; the files hold it where it was measured.
        shown = replace(metrics, bubble_fraction=self._bubble_fraction)
        self._display.update(shown, left_s=left_s)
        if self._is_shown(metrics):
            self._display.show(shown, left_s=left_s)
            self._shown_at_s = self._clock()

    def _wanted_sinks(self) -> Iterator[AbstractContextManager[Sink]]:
        if self._options.tensorboard:  # first: where it is missing, nothing has been made yet
            yield _open_tensorboard(self._folder / TENSORBOARD, self._first_step)
        if self._options.jsonl:
            yield _open_jsonl(self._folder / METRICS)

    def _left_s(self, step: int) -> float:
        """Expect each remaining step to last as long as the middle one of the last steps: a slow one counts little."""
        ordered = sorted(self._recent_s)
        return (self._num_steps - step) * ordered[len(ordered) // 2]

    def _is_shown(self, metrics: StepMetrics) -> bool:
        every = self._options.every
        is_late = self._clock() - self._shown_at_s >= SECONDS_BETWEEN_LINES and not self._output.isatty()
        is_due = metrics.step % every == 0 if every else is_late
        return is_due or metrics.step in (self._first_step, self._num_steps) or metrics.held_out_loss is not None


def _numbers(metrics: StepMetrics, left_s: float) -> dict[str, float]:
    measured = {
        "bubble_fraction": metrics.bubble_fraction,
        "held_out_loss": metrics.held_out_loss,
        "loss_scale": metrics.loss_scale,
        "num_skipped": metrics.num_skipped or None,
    }
    return {
        "loss": metrics.loss,
        "num_tokens": metrics.num_tokens,
        "tokens_per_s": metrics.tokens_per_s,
        "duration_s": metrics.duration_s,
        "learning_rate": metrics.learning_rate,
        "gradient_norm": metrics.gradient_norm,
        "left_s": left_s,
        **{name: value for name, value in measured.items() if value is not None},
    }


class _JsonLines:
    def __init__(self, file: FileIO) -> None:
        self._file = file

    def write(self, step: int, numbers: dict[str, float]) -> None:
        # A number that is not finite becomes null: JSON has no word for it.
        line = orjson.dumps({"step": step, **numbers}, option=orjson.OPT_APPEND_NEWLINE)
        with naming_storage(Path(self._file.name)):
            # The disk may take a part of the line; only the next try says why.
            while line:
                line = line[self._file.write(line) :]


@contextmanager
def _open_jsonl(path: Path) -> Iterator[Sink]:
    with naming_storage(path):
        # Unbuffered: a line is in the file at once, and a full disk shows at the line that did not fit.
        file = path.open("a+b", buffering=0)
    with file:
        with naming_storage(path):
            _end_line(file)
        yield _JsonLines(file)


def _end_line(file: FileIO) -> None:
    """End a line that a killed process has begun."""
    if file.tell() == 0:
        return
    file.seek(-1, os.SEEK_END)
    if file.read(1) != b"\n":
        file.write(b"\n")


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
        row = _loaded(line)
        if not _is_row(row):
            raise FormatError("not the numbers of a step; remove the line", file=str(path), line=number)
        rows[row["step"]] = {key: value for key, value in row.items() if value is not None}
    return [rows[step] for step in sorted(rows)]


def _is_cut_off(line: bytes) -> bool:
    """Whether a process was killed while it wrote this line."""
    return line.startswith(ROW_BEGIN[: len(line)]) and not line.endswith(b"}")


def _loaded(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return None


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return False
    return all(value is None or isinstance(value, int | float) for value in row.values())


class _SummaryWriter(Protocol):
    """The part of TensorBoard's writer that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...

    def close(self) -> None: ...


class _TensorBoard:
    def __init__(self, writer: _SummaryWriter, folder: Path) -> None:
        self._writer = writer
        self._folder = folder

    def write(self, step: int, numbers: dict[str, float]) -> None:
        with naming_storage(self._folder):
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)


@contextmanager
def _open_tensorboard(folder: Path, first_step: int) -> Iterator[Sink]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "the tensorboard package is missing; pip install '.[tensorboard]' in Penstock's clone, "
            "or set metrics.tensorboard = false",
            key="metrics.tensorboard",
        ) from error
    with naming_storage(folder):
        writer: _SummaryWriter = SummaryWriter(log_dir=str(folder), flush_secs=5, purge_step=first_step)
    try:
        yield _TensorBoard(writer, folder)
    finally:
        with naming_storage(folder):
            writer.close()
