"""The folder of a run: what lies in it under which name."""

import os
import re
import shutil
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
"""Of rank 0; the others have their own number."""
METRICS = "metrics.jsonl"
PROFILE = "profile-rank*.json.gz"
MEMORY = "memory-rank*.json.gz"
"""Of each rank, the star being its number."""
TENSORBOARD = "tensorboard"
WANDB = "wandb"
"""Where W&B keeps files of its own, whatever they are."""
LAYER_TIMES = "layer_times.json"
"""What a split by measured seconds uses; runs in the folder share it."""
COSTS = "costs.toml"
"""Of `penstock profile`, which a run leaves alone."""
LOCK = ".lock"
EARLIER = "earlier"
"""Where Penstock 0.1 moved the files of unfinished runs: earlier-1, earlier-2, ..."""
RESULTS = (
    METRICS,
    CHECKPOINTS,
    TENSORBOARD,
    WANDB,
    SCHEDULE,
    TIMELINE,
    TRACE,
    PICTURE,
    PAGE,
    SUMMARY,
    WHOLE,
    INDEX,
    SHARDS,
    "rank*.log",
    PROFILE,
    MEMORY,
    CONFIG,
)
"""What one run leaves behind, the configuration last: until it is moved, the rest counts as that run's."""
SHARED = (TOKENS, LAYER_TIMES, COSTS, LOCK, f"{EARLIER}-*", f"*{PARTIAL_SUFFIX}")
"""What is not of one run."""
INNER: Mapping[str, Sequence[str]] = {
    TOKENS: ("*.tokens", "*.ends", "*.json", "*.unfinished", f"*{PARTIAL_SUFFIX}"),
    "*.unfinished": ("tokens", "ends", "place.json", f"*{PARTIAL_SUFFIX}"),
    TENSORBOARD: ("events.out.tfevents.*",),
    f"{EARLIER}-*": RESULTS,
    CHECKPOINTS: ("step-*",),
    "step-*": ("*.safetensors", "*.json"),
}
"""What lies in the folders that runs make in a run folder."""
MOST_NAMED = 3
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
    """Return what exists of DIR (as number 1), DIR-2, DIR-3, ..."""
    numbered = re.compile(re.escape(base.name) + "-([2-9]|[1-9][0-9]+)")
    try:
        names = os.listdir(base.parent)
    except OSError:  # a folder may be entered that may not be listed
        names = list(takewhile(os.path.lexists, (f"{base}-{number}" for number in count(2))))
    found = {
        int(match[1]): base.with_name(match[0])
        for match in map(numbered.fullmatch, map(os.path.basename, names))
        if match
    }
    return found | ({1: base} if os.path.lexists(base) else {})


def next_folder(base: Path) -> Path:
    """Return the first of DIR, DIR-2, DIR-3, ... behind all that exist."""
    found = numbered_folders(base)
    return base.with_name(f"{base.name}-{max(found) + 1}") if found else base


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
        """What the run continues from."""
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
        """If the block fails, remove the folder of tokens if it was made and is empty, and its parents likewise."""
        made = [self.tokens] * (not os.path.lexists(self.tokens)) + self.missing_folders()
        try:
            yield
        except BaseException:
            remove_empty(made)
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

    def describe_kept(self) -> str:
        """Return a line on what an interrupted run has left here."""
        names = sorted(name for name in self.result_names() if _matches(name, RESULTS))
        if not names:
            return "interrupted before the run began"
        steps = self.checkpoints.steps()
        follows = f"The same command continues after step {steps[0]}" if steps else "It has no checkpoint yet"
        return f"interrupted; {self.path} keeps {', '.join(names)}. {follows}"

    def sweep(self) -> None:
        """Take away what killed ranks left half-written; call it when none of them runs any more."""
        for folder in (self.path, self.tokens):
            remove_abandoned(folder, now_s=inf)
        self.checkpoints.sweep()

    def write(self, name: str, content: bytes) -> None:
        """Write a file that appears whole or not at all. Raises: PenstockError."""
        with atomic_file(self.path / name) as file:
            file.write(content)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _unknown_entries(folder: Path, known: Sequence[str]) -> Iterator[Path]:
    """Yield what no run writes, here and in the folders that runs make; links are not followed."""
    if not os.path.isdir(folder):
        return
    for name in sorted(os.listdir(folder)):
        path = folder / name
        inner = [patterns for made, patterns in INNER.items() if fnmatchcase(name, made)]
        is_folder = path.is_dir() and not path.is_symlink()
        if not _matches(name, known) or (is_folder and not inner and name != WANDB):
            yield path
        elif is_folder and inner:
            yield from _unknown_entries(path, inner[0])


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
