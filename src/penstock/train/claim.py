"""Chooses the folder that a run begins in, and holds it while the run lasts.

Of DIR, DIR-2, DIR-3, ... the one with the highest number decides:

    absent, or without a run                          begin there
    a process holds it                                error
    an unfinished run with the same settings          continue there, from its newest checkpoint or from step 0
    a finished one that is to have more steps         likewise, where it has a checkpoint
    anything else                                     begin in the next number

So no result is ever overwritten, unless `Start.FORCE` asks for it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import TextIO

from penstock.checkpoints.verification import newest_readable
from penstock.errors import CheckpointError, ConfigError, PenstockError
from penstock.execute.control.collectives import Control
from penstock.execute.transport.protocol import Transport
from penstock.files import naming_storage
from penstock.train.data.tokenizer import TOKENIZER_KEY, describe_change
from penstock.train.folder.run_folder import CONFIG, LOCK, SUMMARY, RunFolder, numbered_folders, remove_empty, run_path
from penstock.train.folder.run_lock import RunLock, holder_of
from penstock.train.settings.config import RunConfig, load_config
from penstock.train.together import same_words

KEY = "run.folder"
SAME_SECTIONS = ("model", "data", "batch", "precision", "optimizer")
"""Sections that a run must share with an earlier one to continue it, beside the seed and `run.skip_updates`."""
MAY_DIFFER = ("data.prefetch", "data.tokenizer_digest")
"""Keys of these sections that change no bit; another digest is refused by itself."""
MOST_ATTEMPTS = 100


class Start(Enum):
    """Which folder a run begins in."""

    BY_RULE = auto()
    RESUME = auto()
    """The run begins where an earlier one has left a checkpoint, or ends with an error."""
    FRESH = auto()
    """The run begins in the folder with the next number."""
    FORCE = auto()
    """The run begins in the folder of the configuration, and removes what earlier runs have left there."""
    RESTART = auto()
    """The run begins in the folder of the configuration as it is: its first try has emptied the folder."""


@dataclass(frozen=True, slots=True)
class _Choice:
    path: Path
    reason: str
    is_new: bool = False
    """Whether this process must make the folder itself, so that no other one has it."""


@contextmanager
def claimed(config: RunConfig, start: Start = Start.BY_RULE) -> Iterator[tuple[RunConfig, str]]:
    """Hold a folder for a run while the block lasts; if no run begins there, leave everything as it was.

    Yields the configuration with that folder, and the first line of the run: its folder, and why it is this one. The
    folder is held by a lock in it, since several runs may start at once.

    Raises:
        ConfigError: a process holds the folder, or `Start.FORCE` meets files that no run wrote.
        CheckpointError: the run would continue, but no checkpoint of it can be read, or the newest is of a newer format
            or holds a pickle; or the tokenizer file is another one.
        PenstockError: the folder cannot be made or written.
    """
    base = run_path(config.run.folder)
    for _ in range(MOST_ATTEMPTS):
        # Choose, lock, and look again: another process may have taken the folder in between.
        choice = _choose(base, config, start)
        with ExitStack() as stack:
            folder = RunFolder(choice.path)
            stack.callback(remove_empty, folder.missing_folders())
            lock = _take(choice)
            if lock is None:
                stack.pop_all()  # another process made the folder first, so it must not be removed
                continue
            stack.callback(_release, folder, lock)
            if start in (Start.BY_RULE, Start.RESUME) and _obstacle(choice.path, config):
                continue  # another run began and ended between the look and the lock
            if start is Start.FORCE:
                folder.remove_tokens()
            # The ranks of the run share the lock from here on.
            if not lock.share():
                raise _in_use(choice.path)
            note = f"run folder: {choice.path} ({choice.reason})"
            yield in_folder(config, choice.path), note
            return
    raise PenstockError(f"{base}: other processes took {MOST_ATTEMPTS} folders meanwhile; start again")


@contextmanager
def claimed_together(config: RunConfig, transport: Transport, start: Start, output: TextIO) -> Iterator[RunConfig]:
    """Hold a folder that rank 0 chooses, for all ranks alike; every rank calls it.

    Raises:
        PenstockError: on every rank, as `claimed` does on rank 0.
    """
    with ExitStack() as stack:

        def claim() -> str:
            claimed_config, note = stack.enter_context(claimed(config, start))
            output.write(f"{note}\n")
            return claimed_config.run.folder

        yield in_folder(config, Path(Control(transport).on_rank_0(claim, same_words)))


@contextmanager
def joined(folder: Path) -> Iterator[None]:
    """Share the lock of a claimed folder as one of its ranks, until the block ends.

    On a host that does not see the folder of rank 0 there is no lock to share. Raises: ConfigError, PenstockError.
    """
    with naming_storage(folder):
        lock = RunLock.join(folder)
    if lock is None and (folder / LOCK).exists():
        raise _in_use(folder)
    with nullcontext() if lock is None else closing(lock):
        yield


def in_folder(config: RunConfig, path: Path) -> RunConfig:
    """Return the configuration with another folder."""
    return config.model_copy(update={"run": config.run.model_copy(update={"folder": str(path)})})


def _choose(base: Path, config: RunConfig, start: Start) -> _Choice:
    """Return the folder in which a run begins or continues: `base` or one of `base`-2, `base`-3 and so on.

    By default, a run continues in the folder with the highest number if that run has the same settings and is not
    finished, and begins in the next number else. `start` is what the command line says: `FORCE` and `RESTART` take
    `base` itself, `FRESH` the next number, and `RESUME` raises where the run would not continue.

    Raises:
        ConfigError: another process holds the folder, or `base` holds files of others under `FORCE`.
        CheckpointError: under `RESUME`, there is nothing to continue; or no checkpoint can be read, or the tokenizer
            file has changed.
    """
    if start is Start.FORCE:
        RunFolder(base).require_own_files()
        return _Choice(base, "--force")
    if start is Start.RESTART and base.is_dir():  # without a folder there is nothing to keep, as in a first start
        return _Choice(base, "restarted")
    folders_by_number = numbered_folders(base)
    if not folders_by_number:
        _raise_if_resuming(start, base, "there is no such folder")
        return _Choice(base, "new", is_new=True)
    number = max(folders_by_number)
    newest_path, next_path = folders_by_number[number], base.with_name(f"{base.name}-{number + 1}")
    if start is Start.FRESH:
        return _Choice(next_path, f"--fresh: {newest_path} exists", is_new=True)
    if holder_of(newest_path):
        raise _in_use(newest_path)
    # A finished run, or one of other settings, stays as it is.
    obstacle = _obstacle(newest_path, config)
    if obstacle and newest_path.is_dir():  # the folder may have been removed since it was listed
        _raise_if_resuming(start, newest_path, obstacle)
        return _Choice(next_path, f"{newest_path} {obstacle}", is_new=True)
    if not (newest_path / CONFIG).exists():
        _raise_if_resuming(start, newest_path, "holds no run yet")
        return _Choice(newest_path, "holds no run yet")
    checkpoints = RunFolder(newest_path).checkpoints
    newest_readable(checkpoints.path)  # raises if there are checkpoints and none can be read
    steps = checkpoints.steps()  # newest first
    if not steps:
        _raise_if_resuming(start, newest_path, "its run has no checkpoint")
        reason = "its unfinished run has the same settings and no checkpoint, and begins at step 0"
        return _Choice(newest_path, reason)
    _require_same_tokenizer(newest_path, config)
    return _Choice(newest_path, f"its run has the same settings and continues after step {steps[0]}")


def _require_same_tokenizer(path: Path, config: RunConfig) -> None:
    """Refuse a tokenizer file that is not that of the checkpoints. Raises: CheckpointError."""
    digest = config.data.tokenizer_digest
    expected_digest = load_config(path / CONFIG).data.tokenizer_digest
    if digest and expected_digest and digest != expected_digest:
        raise CheckpointError(
            f"{path}: {TOKENIZER_KEY}: {describe_change(config.data.tokenizer, digest, expected_digest)}. Put the file "
            "back, or begin in the next folder with --fresh"
        )


def _raise_if_resuming(start: Start, path: Path, reason: str) -> None:
    """Raise CheckpointError if the command line says --resume, in a folder whose run cannot continue for a reason."""
    if start is Start.RESUME:
        raise CheckpointError(f"--resume: {path}: {reason}; leave --resume out to begin a run")


def _obstacle(path: Path, config: RunConfig) -> str:
    """Return what keeps a run from beginning or continuing in a folder, or an empty text."""
    folder = RunFolder(path)
    names = folder.result_names()
    if not names:
        return ""
    if CONFIG not in names:
        return "holds files but no run"
    is_finished, steps = SUMMARY in names, folder.checkpoints.steps()
    try:
        earlier = load_config(path / CONFIG)
    except PenstockError:
        return "holds a finished run" if is_finished else f"holds a {CONFIG} that cannot be read"
    if is_finished and not (steps and earlier.run.steps < config.run.steps):
        return "holds a finished run"
    if different := _differing_keys(earlier, config):
        return f"holds {'a finished' if is_finished else 'an unfinished'} run with another {', '.join(different)}"
    if steps and steps[0] > config.run.steps:
        return f"holds a run that has passed step {config.run.steps}"
    return ""


def _differing_keys(earlier: RunConfig, config: RunConfig) -> list[str]:
    """Return the keys that decide about the weights and whose values differ from those of the earlier run."""
    keys = []
    for name in SAME_SECTIONS:
        earlier_values = dict(getattr(earlier, name))
        keys += [f"{name}.{key}" for key, value in getattr(config, name) if value != earlier_values[key]]
    run_keys = [
        f"run.{key}" for key in ("seed", "skip_updates") if getattr(earlier.run, key) != getattr(config.run, key)
    ]
    return [key for key in keys if key not in MAY_DIFFER] + run_keys


def _take(choice: _Choice) -> RunLock | None:
    """Make the chosen folder and lock it for this process alone; None if another process was quicker with a new one."""
    with naming_storage(choice.path):
        try:
            choice.path.mkdir(parents=True, exist_ok=not choice.is_new)
        except FileExistsError:
            if not choice.is_new:
                raise
            return None
        lock = RunLock.take(choice.path)
    if lock is None and not choice.is_new:
        raise _in_use(choice.path)
    return lock


def _release(folder: RunFolder, lock: RunLock) -> None:
    if not (folder.path / CONFIG).exists():
        lock.remove()  # no run began here
    lock.close()


def _in_use(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is in use by {holder_of(path) or 'another process'}. Wait until that run ends, or begin in the next "
        "folder with --fresh",
        key=KEY,
    )
