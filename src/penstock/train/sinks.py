"""Where the numbers of a run's steps go: JSON lines, and files for TensorBoard."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Protocol

import orjson

from penstock.errors import ConfigError
from penstock.files import naming_storage


class Sink(Protocol):
    """Where numbers go, one set a step."""

    def write(self, step: int, numbers: dict[str, float]) -> None: ...


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
def open_jsonl(path: Path) -> Iterator[Sink]:
    """Append to a file, one object a step. Raises: PenstockError: path and reason."""
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
def open_tensorboard(folder: Path, first_step: int) -> Iterator[Sink]:
    """Write files for TensorBoard; what they hold of `first_step` and later does not count any more.

    Raises:
        ConfigError: the package is missing.
        PenstockError: a file cannot be written: path and reason.
    """
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
