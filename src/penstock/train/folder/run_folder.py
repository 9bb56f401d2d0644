"""The folder of a run: what lies in it under which name, and the log of each rank."""

import logging
import os
import re
import shutil
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import count, islice, takewhile
from math import inf
from pathlib import Path

from penstock.checkpoints.folder import CheckpointFolder
from penstock.checkpoints.weight_files import INDEX, SHARDS, WHOLE
from penstock.errors import ConfigError, PenstockError
from penstock.execute.observing.log import LOG as LOGGER
from penstock.files import PARTIAL_SUFFIX, atomic_file, naming_storage, remove_abandoned
from penstock.train.settings.config import RunConfig, config_to_toml, load_config

CONFIG = "config.toml"
TOKENS = "tokens"
SCHEDULE = "schedule.csv"
CHECKPOINTS = "checkpoints"
TIMELINE = "timeline.json"
TRACE = "timeline.trace.json"
PICTURE = "timeline.png"
PAGE = "timeline.html"
SUMMARY = "summary.json"
LOG = "rank0.log"
"""The log of rank 0; another rank's has its number in place of the 0."""
METRICS = "metrics.jsonl"
PROFILE = "profile-rank*.json.gz"
MEMORY = "memory-rank*.json.gz"
"""The files of the profiler, one per rank, whose number stands for the star."""
TENSORBOARD = "tensorboard"
WANDB = "wandb"
"""The folder of W&B's own files, whose names W&B chooses."""
LAYER_TIMES = "layer_times.json"
"""The seconds of a measured split; runs in the folder share them."""
COSTS = "costs.toml"
"""The costs that `penstock profile` writes, which a run leaves alone."""
LOCK = ".lock"
EARLIER = "earlier"
"""The folders, earlier-1, earlier-2, ..., to which Penstock 0.1 moved the files of unfinished runs."""
MEANING: Mapping[str, str] = {
    CONFIG: "every setting of the run, with its meaning",
    WHOLE: "the trained weights, with the names of the unsplit model",
    INDEX: "which of the files weights-* holds which of the trained weights",
    SCHEDULE: "the schedule that ran, one row per rank",
    LAYER_TIMES: "what each layer took when it was measured: the split uses it",
    SUMMARY: "the last losses, and the timelines in figures",
    METRICS: "one line of numbers per step",
    TIMELINE: "the recorded step as it was measured: penstock doctor says where its time went",
    PICTURE: "the recorded step, rank by rank: measured above predicted",
    PAGE: "the same, to zoom and point at: open it in a browser",
    TRACE: "the same with every message: open it at https://ui.perfetto.dev",
    PROFILE: "the profiled steps of each rank: open it at https://ui.perfetto.dev",
    MEMORY: "what the GPU of each rank held at the end of these steps",
    LOG: "what rank 0 logged (debug.log); each rank has such a file",
}
"""The files that people look at, in the order of the list at a run's end."""
RESULTS = (
    *(name for name in MEANING if name not in (LOG, LAYER_TIMES)),
    *(CHECKPOINTS, TENSORBOARD, WANDB, SHARDS, "rank*.log"),
)
"""The names of all files of one run; as long as its configuration is there, the rest counts as that run's."""
SHARED = (TOKENS, LAYER_TIMES, COSTS, LOCK, f"{EARLIER}-*", f"*{PARTIAL_SUFFIX}")
"""The names of files that all runs in the folder share."""
INNER: Mapping[str, Sequence[str]] = {
    TOKENS: ("*.tokens", "*.ends", "*.json", "*.unfinished", f"*{PARTIAL_SUFFIX}"),
    "*.unfinished": ("tokens", "ends", "place.json", f"*{PARTIAL_SUFFIX}"),
    TENSORBOARD: ("events.out.tfevents.*",),
    f"{EARLIER}-*": RESULTS,
    CHECKPOINTS: ("step-*",),
    "step-*": ("*.safetensors", "*.json"),
}
"""The names in the folders that runs make in a run folder."""
MOST_NAMED = 3
DESCRIPTORS = Path("/proc/self/fd")
"""The folder in which Linux links each open descriptor of this process to its file's present name."""
LOG_LEVELS = {"info": logging.INFO, "debug": logging.DEBUG}
LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"
_MOVE_AWAY = "Move it away if the folder is a run's, or set another run.folder"


def run_path(folder: str) -> Path:
    """Return the path of a run folder, which has a name that others can be numbered after. Raises: ConfigError."""
    if "\0" in folder:
        raise ConfigError(f"{folder!r} holds a null character, which no path can", key="run.folder")
    path = Path(folder)
    path = path if path.name not in ("", "..") else Path(os.path.abspath(path))
    if not path.name:
        raise ConfigError(f"{folder!r} is no folder for a run; name another one", key="run.folder")
    return path


def numbered_folders(base: Path) -> dict[int, Path]:
    """Return the folders that exist of DIR (as number 1), DIR-2, DIR-3, ..., by number."""
    numbered = re.compile(re.escape(base.name) + "-([2-9]|[1-9][0-9]+)")
    try:
        names = os.listdir(base.parent)
    except OSError:  # a folder may be entered that may not be listed
        names = list(takewhile(os.path.lexists, (f"{base}-{number}" for number in count(2))))
    folders = {
        int(match[1]): base.with_name(match[0])
        for match in map(numbered.fullmatch, map(os.path.basename, names))
        if match
    }
    return folders | ({1: base} if os.path.lexists(base) else {})


def next_folder(base: Path) -> Path:
    """Return the first of DIR, DIR-2, DIR-3, ... behind all that exist."""
    folders = numbered_folders(base)
    return base.with_name(f"{base.name}-{max(folders) + 1}") if folders else base


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove these folders, each before its parent, unless something lies in them."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A folder that rank 0 writes to; `tokens` is read by every rank."""

    path: Path

    @property
    def tokens(self) -> Path:
        """The cache of tokenized text."""
        return self.path / TOKENS

    @property
    def checkpoints(self) -> CheckpointFolder:
        """The checkpoints that the run continues from."""
        return CheckpointFolder(self.path / CHECKPOINTS)

    @property
    def other_tokens(self) -> list[Path]:
        """The caches of the folders with other numbers; what one has need not be made again."""
        base = self.path.with_name(re.sub("-([2-9]|[1-9][0-9]+)$", "", self.path.name) or self.path.name)
        return [path / TOKENS for path in numbered_folders(base).values() if path != self.path]

    def missing_folders(self) -> list[Path]:
        """Return the folders that must be made for this one, each before its parent."""
        return [folder for folder in (self.path, *self.path.parents) if not os.path.lexists(folder)]

    @contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """Remove the folder of tokens and its parents if the block made them, fails, and leaves them empty."""
        created_folders = [self.tokens] * (not os.path.lexists(self.tokens)) + self.missing_folders()
        try:
            yield
        except BaseException:
            remove_empty(created_folders)
            raise

    def result_names(self) -> list[str]:
        """Return the names of all entries but those that runs in this folder share; none where it cannot be read."""
        try:
            names = os.listdir(self.path)
        except OSError:
            return []
        return [name for name in names if not _matches(name, SHARED)]

    def begin(self, config: RunConfig, *, is_forced: bool = False) -> str:
        """Make the folder that of a run; return a line on what was done to an earlier one.

        A run that has checkpoints stays as it is until `go_on`; `is_forced` removes it. Only the process whose run
        holds the folder may call this.

        Raises:
            PenstockError: the folder is no folder or cannot be written (path and reason).
        """
        with naming_storage(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            remove_abandoned(self.path, now_s=inf)
            self.checkpoints.sweep()
            note = self._remove_all() if is_forced else ""
        if not self.checkpoints.steps():
            self.go_on(config)
        return note

    def go_on(self, config: RunConfig) -> None:
        """Write the resolved configuration; the run counts as unfinished from here on.

        Raises:
            PenstockError: the folder cannot be written (path and reason).
        """
        with naming_storage(self.path):
            (self.path / SUMMARY).unlink(missing_ok=True)
        self.write(CONFIG, config_to_toml(config).encode())

    def _remove_all(self) -> str:
        """Remove what runs have left; the tokens of this run and its lock stay."""
        self.require_own_files()
        names = [name for name in os.listdir(self.path) if name not in (TOKENS, LOCK)]
        for name in sorted(names, key=CONFIG.__eq__):
            _remove(self.path / name)
        return f"removed what earlier runs had left in {self.path}" if names else ""

    def remove_tokens(self) -> None:
        """Remove the cache of tokenized text."""
        if self.tokens.exists():
            with naming_storage(self.tokens):
                _remove(self.tokens)

    def require_own_files(self) -> None:
        """Refuse a folder with files that no run wrote. Raises: ConfigError."""
        with naming_storage(self.path):
            unknown = list(islice(_unknown_entries(self.path, (*RESULTS, *SHARED)), MOST_NAMED))
        if unknown:
            names = ", ".join(str(path.relative_to(self.path)) for path in unknown)
            raise ConfigError(f"--force: {self.path} holds what no run wrote ({names}). {_MOVE_AWAY}", key="run.folder")
        config = self.path / CONFIG
        try:
            load_config(config) if config.exists() else None
        except PenstockError as error:
            raise ConfigError(f"--force: {config} is not of a run. {_MOVE_AWAY}", key="run.folder") from error

    def describe_interruption(self) -> str:
        """Return a line on the files that an interrupted run has left here, and on whether it can continue."""
        names = sorted(name for name in self.result_names() if _matches(name, RESULTS))
        if not names:
            return "interrupted before the run began"
        steps = self.checkpoints.steps()
        follows = f"The same command continues after step {steps[0]}" if steps else "It has no checkpoint yet"
        return f"interrupted; {self.path} keeps {', '.join(names)}. {follows}"

    def sweep(self) -> None:
        """Remove files that killed ranks left half-written; call it when none of them runs any more."""
        for folder in (self.path, self.tokens):
            remove_abandoned(folder, now_s=inf)
        self.checkpoints.sweep()

    def write(self, name: str, content: bytes) -> None:
        """Write a file that appears whole or not at all. Raises: PenstockError."""
        with atomic_file(self.path / name) as file:
            file.write(content)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _unknown_entries(folder: Path, patterns: Sequence[str]) -> Iterator[Path]:
    """Yield the entries that no run writes, of a folder and of runs' folders in it; links are not followed."""
    if not os.path.isdir(folder):
        return
    for name in sorted(os.listdir(folder)):
        path = folder / name
        inner_patterns = next((inner for pattern, inner in INNER.items() if fnmatchcase(name, pattern)), None)
        is_folder = path.is_dir() and not path.is_symlink()
        if not _matches(name, patterns) or (is_folder and inner_patterns is None and name != WANDB):
            yield path
        elif is_folder and inner_patterns is not None:
            yield from _unknown_entries(path, inner_patterns)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


class HeldFolder:
    """A folder that is held open, so that it is found again after somebody has renamed it."""

    def __init__(self, path: Path) -> None:
        """Open the folder until this object is gone. Raises: OSError."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        weakref.finalize(self, os.close, self._descriptor)

    @property
    def is_in_place(self) -> bool:
        """Whether its path still stands for this folder."""
        return self._is_at(self.path)

    def current_path(self) -> Path | None:
        """Return where the folder is now; None where it was removed, or the system does not say."""
        if self.is_in_place:
            return self.path
        try:
            path = Path(os.readlink(DESCRIPTORS / str(self._descriptor)))
        except OSError:
            return None
        return path if self._is_at(path) else None

    def _is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._descriptor))
        except OSError:
            return False


@contextmanager
def run_log(folder: Path, rank: int, level: str) -> Iterator[None]:
    """Write records of `level` ("info" or "debug") and above to the rank's log while the block runs; "off": none."""
    if level not in LOG_LEVELS:
        yield
        return
    handler = logging.FileHandler(folder / f"rank{rank}.log", mode="a", encoding="utf-8")
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    earlier_level = LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(LOG_LEVELS[level])
    try:
        yield
    finally:
        LOGGER.setLevel(earlier_level)
        LOGGER.removeHandler(handler)
        handler.close()
