"""Where the numbers of a run's steps go: JSON lines, files for TensorBoard, and W&B."""

import os
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

import orjson

from penstock.errors import ConfigError
from penstock.files import naming_storage
from penstock.train.folder.run_folder import CONFIG
from penstock.train.settings.sections import MetricsSection

WANDB_SETTINGS = {"silent": True, "console": "off", "init_timeout": 20.0, "login_timeout": 10.0}
"""It neither prints nor reads what is printed, and gives up soon: the other ranks wait."""
LONGEST_END_S = 30.0
"""How long the end of a run waits for W&B to send what it has."""


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


class _WandbRun(Protocol):
    """The part of a W&B run that is used."""

    def log(self, data: dict[str, Any], step: int) -> None: ...

    def finish(self) -> None: ...


class _Wandb:
    """Passes numbers on to W&B until it fails; a run does not end for that, and one line says so."""

    def __init__(self, tell: Callable[[str], None], limit_s: float) -> None:
        self._tell = tell
        self._limit_s = limit_s
        self._run: _WandbRun | None = None

    def attempt(self, act: Callable[[], _WandbRun | None]) -> None:
        """Do what W&B may fail in; what it returns is the run from now on."""
        try:
            self._run = act()
        except Exception as error:  # whatever a service, its network or its login raise
            self._run = None
            reason = " ".join(str(error).split())
            self._tell(f"training goes on without W&B: {type(error).__name__}: {reason}")

    def write(self, step: int, numbers: dict[str, float]) -> None:
        run = self._run
        if run is not None:
            self.attempt(lambda: _logged(run, step, numbers))

    def close(self) -> None:
        """End the run; what is not sent within the limit stays in the folder."""
        run = self._run
        if run is None:
            return
        ending = Thread(target=self.attempt, args=(run.finish,), daemon=True)
        ending.start()
        ending.join(self._limit_s)
        if ending.is_alive():
            self._tell(f"W&B has not taken everything within {self._limit_s:g} s; `wandb sync` sends the rest")


def _logged(run: _WandbRun, step: int, numbers: dict[str, float]) -> _WandbRun:
    run.log(numbers, step=step)
    return run


@contextmanager
def open_wandb(
    folder: Path, options: MetricsSection, tell: Callable[[str], None], *, limit_s: float = LONGEST_END_S
) -> Iterator[Sink]:
    """Log to W&B as a run of the folder's name, with the settings of its configuration; `tell` gets why it fails.

    Raises:
        ConfigError: the package is missing.
    """
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            "the wandb package is missing; pip install '.[wandb]' in Penstock's clone, or set metrics.wandb = 'off'",
            key="metrics.wandb",
        ) from error
    settings = tomllib.loads((folder / CONFIG).read_text()) if (folder / CONFIG).exists() else {}
    sink = _Wandb(tell, limit_s)
    sink.attempt(
        lambda: wandb.init(
            project=options.wandb_project,
            name=folder.name,
            dir=str(folder),
            mode=options.wandb,
            config=settings,
            settings=WANDB_SETTINGS,
        )
    )
    try:
        yield sink
    finally:
        sink.close()
