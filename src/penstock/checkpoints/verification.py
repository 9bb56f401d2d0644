"""Finding a checkpoint that is as it was written: every byte is read, the work shared by all ranks."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from penstock.checkpoints.agreement import failing_as, run_together
from penstock.checkpoints.content import SEPARATOR
from penstock.checkpoints.folder import CheckpointFolder, step_of
from penstock.checkpoints.manifest import (
    MANIFEST,
    Manifest,
    TensorEntry,
    UnreadableFormat,
    holds_pickles,
    read_manifest,
)
from penstock.checkpoints.shards import pickles_in, problem_of, shapes_of
from penstock.errors import CheckpointError
from penstock.execute.control.collectives import Control
from penstock.execute.transport.calls import collective
from penstock.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint that verified."""

    path: Path
    manifest: Manifest
    damaged: tuple[str, ...] = ()
    """The problem of each newer checkpoint, none of which verified."""


def candidates(folder: Path) -> list[Path]:
    """Return the checkpoints that a path names, the newest first: itself, or those in it."""
    if (folder / MANIFEST).exists():
        return [folder]
    checkpoints = CheckpointFolder(folder)
    paths = [checkpoints.of_step(step) for step in checkpoints.steps()]
    # A folder of this name without a manifest is a damaged checkpoint, or somebody has put checkpoints into it.
    return paths or ([folder] if step_of(folder) is not None else [])


def verify(folder: Path, *, rank: int = 0, num_ranks: int = 1) -> Manifest:
    """Read a rank's share of a checkpoint's files, and compare each with what was written; one rank reads all of them.

    Raises:
        UnreadableFormat: of a newer format, or with a pickle in it.
        CheckpointError: naming the first file that is missing, cut short or changed.
    """
    manifest = read_manifest(folder)
    if pickles := pickles_in(folder, manifest.files):
        raise holds_pickles(folder, pickles)
    for name in sorted(manifest.files)[rank::num_ranks]:
        if problem := problem_of(folder / name, manifest.files[name]):
            raise CheckpointError(problem)
    if rank == 0:
        _require_tensors(folder, manifest)
    return manifest


def newest_readable(folder: Path) -> Path | None:
    """Return the newest checkpoint whose manifest can be read; None where there is no checkpoint.

    No file of tensors is read, so it may still be damaged. Raises: as `find_newest`, as far as manifests say so.
    """
    damaged: list[str] = []
    for path in candidates(folder):
        try:
            manifest = read_manifest(path)
        except UnreadableFormat:
            raise
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        if pickles := pickles_in(path, manifest.files):
            raise holds_pickles(path, pickles)
        return path
    if damaged:
        raise CheckpointError(_none_verifies(folder, damaged))
    return None


@collective
def latest_checkpoint(folder: str | Path, pipeline: Pipeline) -> Path | None:
    """Return the newest checkpoint `folder/step-N`, or None where there is none yet; every rank calls it.

    Call it before training, to continue, or to see that a new training finds a folder without steps of another one:
    a checkpoint is never written over. A folder that is empty, or not there, has none. Rank 0 looks, and tells all
    ranks. Only what describes the checkpoint is read, so `load_checkpoint` may find it damaged and take an older one.

    Raises:
        CheckpointError: on every rank: `folder` is no folder, or none of its checkpoints can be read.
        PipelineError: a rank is lost.
    """

    def newest() -> str:
        path = Path(folder)  # here, so that what is no path is one error on all ranks
        if path.exists() and not path.is_dir():
            raise CheckpointError(f"{path}: is no folder, so no checkpoint can be in it; give another name")
        return str(newest_readable(path) or "")

    name: str = pipeline.control.on_rank_0(newest, failing_as(CheckpointError))
    return Path(name) if name else None


def find_newest(control: Control, folder: Path) -> FoundCheckpoint:
    """Return the newest checkpoint in a folder that verifies, the same on every rank; every rank calls it.

    Raises:
        UnreadableFormat: the newest is of a newer format, or holds a pickle.
        CheckpointError: none is there, or none verifies: each is named with what is wrong with it.
    """
    fails_as = failing_as(CheckpointError)
    names: list[str] = control.on_rank_0(lambda: list(map(str, candidates(folder))), fails_as)
    if not names:
        raise CheckpointError(
            f"{folder}: holds no checkpoint; expected folders step-N, each with a {MANIFEST}. "
            "penstock.latest_checkpoint tells before whether there is one"
        )
    damaged: list[str] = []
    for path in map(Path, names):
        problem, is_final = _first_problem(control, path)
        if not problem:
            return FoundCheckpoint(path, read_manifest(path), tuple(damaged))
        if is_final:
            raise UnreadableFormat(problem)
        damaged.append(problem)
    raise CheckpointError(_none_verifies(folder, damaged))


def _none_verifies(folder: Path, damaged: Sequence[str]) -> str:
    hint = "Put back a copy that is whole, or begin the training anew"
    if len(damaged) == 1:
        return f"{damaged[0]}. {hint}"
    first = f"{folder}: none of {len(damaged)} checkpoints is as it was written. {hint}:"
    return "\n  ".join([first, *damaged])


def _first_problem(control: Control, path: Path) -> tuple[str, bool]:
    """Return what is wrong with a checkpoint, or nothing, and whether that is final: no older one may be taken instead.

    All ranks read a share of the files and return the same.
    """

    def verify_share() -> tuple[str, bool]:
        try:
            verify(path, rank=control.rank, num_ranks=control.num_ranks)
        except CheckpointError as error:
            return str(error), isinstance(error, UnreadableFormat)
        except OSError as error:
            return f"{path}: cannot be read: {error.strerror or error}", False
        return "", False

    local_outcome = run_together(control, verify_share, num_bytes=size_of(path.glob("*")), path=path)
    outcomes = cast(list[tuple[str, bool]], control.all_gather_object(local_outcome))
    # A final problem goes before others, then that of the lowest rank: every rank names the same one.
    problems = sorted((not is_final, rank, problem) for rank, (problem, is_final) in enumerate(outcomes) if problem)
    return (problems[0][2], not problems[0][0]) if problems else ("", False)


def size_of(files: Iterable[Path]) -> int:
    """Return how many bytes files have; what cannot be read, such as a link to nothing, has none."""
    total = 0
    for file in files:
        with suppress(OSError):
            total += file.stat().st_size
    return total


def _require_tensors(folder: Path, manifest: Manifest) -> None:
    """Make sure that the files hold the tensors that are listed, so that none was dropped when it was written."""
    entries_by_file: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in manifest.weights.items():
        entries_by_file.setdefault(entry.file, {})[name] = entry
    for name, state in manifest.optimizer.state.items() if manifest.optimizer else ():
        for key, entry in state.tensors.items():
            entries_by_file.setdefault(entry.file, {})[f"{name}{SEPARATOR}{key}"] = entry
    for file, entries in entries_by_file.items():
        if file not in manifest.files:
            raise CheckpointError(f"{folder / file}: is not among the files of {folder / MANIFEST}")
        tensors = shapes_of(folder / file)
        for name, entry in entries.items():
            if tensors.get(name) != (entry.dtype, tuple(entry.shape)):
                raise CheckpointError(
                    f"{folder / file}: has {tensors.get(name, 'nothing')} as {name!r}; expected {entry.dtype} "
                    f"{tuple(entry.shape)}"
                )
