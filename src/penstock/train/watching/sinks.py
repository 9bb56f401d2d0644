"""Where the numbers of a run's steps go: JSON lines, files for TensorBoard, and W&B."""

import os
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from threading import Thread
from typing import Any

import orjson

from penstock.files import naming_storage
from penstock.train.folder.run_folder import CONFIG
from penstock.train.settings.optional_packages import TENSORBOARD, WANDB
from penstock.train.settings.sections import MetricsSection

WANDB_SETTINGS = {"silent": True, "console": "off", "init_timeout": 20.0, "login_timeout": 10.0}
"""It neither prints nor reads what is printed, and gives up soon: the other ranks wait."""
LONGEST_END_S = 30.0
"""Seconds that the end of a run waits for W&B to send its numbers."""


Sink = Callable[[int, dict[str, float]], None]
"""A function that takes the number of a step, and its numbers by name."""


@contextmanager
def open_jsonl(path: Path) -> Iterator[Sink]:
    """Append to a file, one object a step. Raises: PenstockError: path and reason."""
    with naming_storage(path):
        # Unbuffered: a line is in the file at once, and a full disk shows at the line that did not fit.
        file = path.open("a+b", buffering=0)

    def write(step: int, numbers: dict[str, float]) -> None:
        # A number that is not finite becomes null: JSON has no word for it.
        line = orjson.dumps({"step": step, **numbers}, option=orjson.OPT_APPEND_NEWLINE)
        with naming_storage(path):
            # The disk may take a part of the line; only the next try says why.
            while line:
                line = line[file.write(line) :]

    with file:
        with naming_storage(path):
            _end_line(file)
        yield write


def _end_line(file: FileIO) -> None:
    """End a line that a killed process has begun."""
    if file.tell() == 0:
        return
    file.seek(-1, os.SEEK_END)
    if file.read(1) != b"\n":
        file.write(b"\n")


@contextmanager
def open_tensorboard(folder: Path, first_step: int) -> Iterator[Sink]:
    """Write files for TensorBoard; what they hold of `first_step` and later does not count any more.

    Raises:
        ConfigError: the package is missing.
        PenstockError: a file cannot be written: path and reason.
    """
    summary_writer = TENSORBOARD.load().SummaryWriter
    with naming_storage(folder):
        writer = summary_writer(log_dir=str(folder), flush_secs=5, purge_step=first_step)

    def write(step: int, numbers: dict[str, float]) -> None:
        with naming_storage(folder):
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)

    try:
        yield write
    finally:
        with naming_storage(folder):
            writer.close()


class _Wandb:
    """Passes numbers on to W&B until it fails; a run does not end for that, and one line says so."""

    def __init__(self, init: Callable[[], Any], tell: Callable[[str], None], limit_s: float) -> None:
        """Begin the run that `init` returns."""
        self._tell = tell
        self._limit_s = limit_s
        self._run: Any = self._attempt(init)
        """The run object of W&B; None once W&B has failed."""

    def _attempt(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Exception as error:  # a service, its network and its login raise errors of any kind
            self._run = None
            reason = " ".join(str(error).split())
            self._tell(f"training goes on without W&B: {type(error).__name__}: {reason}")
            return None

    def write(self, step: int, numbers: dict[str, float]) -> None:
        if self._run is not None:
            self._attempt(partial(self._run.log, numbers, step=step))

    def close(self) -> None:
        """End the run; what is not sent within the limit stays in the folder."""
        if self._run is None:
            return
        ending = Thread(target=self._attempt, args=(self._run.finish,), daemon=True)
        ending.start()
        ending.join(self._limit_s)
        if ending.is_alive():
            self._tell(f"W&B has not taken everything within {self._limit_s:g} s; `wandb sync` sends the rest")


@contextmanager
def open_wandb(
    folder: Path, options: MetricsSection, tell: Callable[[str], None], *, limit_s: float = LONGEST_END_S
) -> Iterator[Sink]:
    """Log to W&B as a run of the folder's name, with the settings of its configuration; `tell` gets why it fails.

    Raises:
        ConfigError: the package is missing.
    """
    wandb = WANDB.load()
    settings = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8")) if (folder / CONFIG).exists() else {}
    begin = partial(
        wandb.init,
        project=options.wandb_project,
        name=folder.name,
        dir=str(folder),
        mode=options.wandb,
        config=settings,
        settings=WANDB_SETTINGS,
    )
    with closing(_Wandb(begin, tell, limit_s)) as sink:
        yield sink.write
