"""`CheckpointWriter`: saves checkpoints of all ranks beside the steps that follow, and announces each when it is whole.

    every rank   copies what it writes ─► a thread writes and flushes its files ─► gather: all written
    rank 0                                                                      a thread writes checkpoint.json,
                                                                                renames the folder, removes old ones
    every rank                                                                  gather: announced

Gathers are within `save`, `poll` and `finish`, which all ranks call alike; threads send no messages. A rank that is
killed at any instant leaves a folder under another name, or a whole checkpoint.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from penstock.checkpoints.agreement import failing_as, longest_s, require_equal_on_ranks
from penstock.checkpoints.content import (
    OPTIMIZER,
    WEIGHTS,
    Described,
    file_name,
    gather_content,
    owned_names,
)
from penstock.checkpoints.folder import CheckpointFolder
from penstock.checkpoints.manifest import (
    MANIFEST,
    Manifest,
    OptimizerEntry,
    ParameterState,
    TensorEntry,
    manifest_bytes,
)
from penstock.checkpoints.optimizer_state import merged_groups
from penstock.checkpoints.random_state import random_state
from penstock.checkpoints.shards import (
    FileEntry,
    cannot_write,
    naming_file,
    record_of,
    require_visible,
    write_shard,
)
from penstock.checkpoints.staging import Staging, stage
from penstock.checkpoints.verification import verify
from penstock.checkpoints.weight_files import INDEX, index_bytes
from penstock.errors import CheckpointError, NotSaved, PipelineError, described, warn
from penstock.execute.control.collectives import Control
from penstock.execute.control.long_work import run_in_thread, wait_together
from penstock.execute.transport.calls import collective
from penstock.files import flush
from penstock.pipeline import Pipeline
from penstock.version import VERSION

Files = dict[str, dict[str, Any]]
"""The fields of a `FileEntry` by name, as plain values that ranks send each other."""
_AS_NOT_SAVED = failing_as(NotSaved)


class CheckpointWriter:
    """The checkpoints of one training; every rank has one and calls it alike.

    `keep_last` checkpoints stay, and those of steps that `keep_every` divides; 0 keeps all of them, and no others.
    Those of later steps than the one that is saved stay, and are warned of, since they are loaded before it. With
    `asynchronous`, `save` returns when the tensors are copied, and what goes wrong later is raised by the next call.
    """

    def __init__(
        self,
        folder: str | Path,
        pipeline: Pipeline,
        optimizer: Optimizer | None = None,
        *,
        keep_last: int = 0,
        keep_every: int = 0,
        asynchronous: bool = True,
    ) -> None:
        self.folder = CheckpointFolder(Path(folder))
        self._pipeline = pipeline
        self._optimizer = optimizer
        self._keep = {"keep_last": keep_last, "keep_every": keep_every}
        self._is_asynchronous = asynchronous
        self._staging = Staging()
        self._save: _Save | None = None
        self._warned: set[str] = set()

    @collective
    def save(self, step: int, extra: Mapping[str, Any] | None = None) -> None:
        """Save all that continuing after `step` needs; `extra` is JSON, the same on all ranks.

        Waits until the save before is over, since only one is in flight.

        Raises:
            NotSaved: on every rank, where something cannot be saved, or this or the last one cannot be written.
            PipelineError: a rank is lost, or copies of a tied parameter have drifted apart.
        """
        self.finish()
        self._pipeline.require_equal_copies()
        control, given = self.control, dict(extra or {})

        def describe() -> tuple[int, str, dict[str, Any]]:
            if not isinstance(step, int) or isinstance(step, bool) or step < 0:
                raise NotSaved(f"step: {described(step)}; expected a whole number, at least 0")
            keep = self._keep["keep_last"]
            if not isinstance(keep, int) or isinstance(keep, bool) or keep < 0:
                raise NotSaved(f"keep: {described(keep)}; expected a number of checkpoints, or 0 for all")
            return step, _json_of(given), random_state(self._pipeline.device)

        content, everyone, others = gather_content(self._pipeline, self._optimizer, describe)
        for what, values in zip(("step", "`extra`"), zip(*others, strict=True), strict=False):
            require_equal_on_ranks(what, values, self.folder.path, control.names)
        owned = owned_names(everyone)
        staged = stage(self._staging, self._pipeline, content, owned)
        manifests: list[Manifest] = []

        def begin() -> str:
            random = [state for *_, state in others]
            manifests.append(self._manifest(everyone, owned, step=step, extra=given, random=random))
            return self._begin(step)

        partial = Path(control.on_rank_0(begin, _AS_NOT_SAVED))
        written = run_in_thread(lambda: _write_files(partial, staged, control.rank, control.num_ranks))
        self._save = _Save(partial, step, self._staging.num_bytes, written, next(iter(manifests), None))
        if not self._is_asynchronous:
            self.finish()

    @collective
    def poll(self) -> None:
        """Announce the checkpoint in flight if all its files are written by now; a collective, without a wait.

        Raises: as `save`, for the one in flight.
        """
        if self._save is not None:
            self._advance(self._save)

    @collective
    def finish(self, limit_s: float | None = None) -> bool:
        """Wait until the checkpoint in flight is announced; return whether it is. A collective.

        Raises: as `save`; also NotSaved where a disk does not answer and no `limit_s` is given.
        """
        while (save := self._save) is not None:
            longest = longest_s(save.num_bytes) if limit_s is None else limit_s
            if not wait_together(self.control, save.current, limit_s=longest):
                if limit_s is not None:
                    return False
                self._save = None
                raise NotSaved(f"{save.partial}: a disk took more than {longest:.0f} s for it. See to it")
            self._advance(save)
        return True

    @property
    def control(self) -> Control:
        """The collectives of the pipeline that is saved."""
        return self._pipeline.control

    # ---- one save

    def _begin(self, step: int) -> str:
        """Make the folder of a save, and return its path."""
        with naming_file(self.folder.path):
            return str(self.folder.begin(step))

    def _advance(self, save: "_Save") -> None:
        """Learn how far all ranks are, and announce the checkpoint when all have written their files."""
        try:
            everyone = self.control.together(save.files, _AS_NOT_SAVED)
        except PipelineError:  # a rank is lost
            raise
        except Exception:
            self._save = None
            if self.control.rank == 0:
                shutil.rmtree(save.partial, ignore_errors=True)
            raise
        if None in everyone:
            return
        if save.announced is not None:
            self._save = None
            self._warn(save.announced.result())
            return
        files = {name: entry for theirs in everyone for name, entry in theirs.items()}
        manifest = save.manifest
        save.announced = run_in_thread(lambda: {} if manifest is None else self._announce(save, files, manifest))

    def _announce(self, save: "_Save", files: Files, manifest: Manifest) -> dict[str, str]:
        """Make the checkpoint whole and give it its name; return what to warn of, by its sort."""
        path = save.partial
        try:
            entries = {name: FileEntry(**fields) for name, fields in files.items()}
            for name, entry in entries.items():
                require_visible(path / name, entry.num_bytes)
            _write(path / INDEX, index_bytes(manifest.weights))
            entries[INDEX] = record_of(path / INDEX)
            whole = manifest.model_copy(update={"files": dict(sorted(entries.items()))})
            _write(path / MANIFEST, manifest_bytes(whole))
            self._make_room(save.step)
            self.folder.announce(path, save.step)
        except OSError as error:
            raise cannot_write(Path(error.filename or path), error) from error
        # The new one is whole, so an old one that cannot be removed is no reason to end a training.
        problem = self.folder.retain(save.step, **self._keep)
        kept = problem and f"{problem}. It stays; later saves try again, and warn no more. Remove it yourself"
        newest, later = max(self.folder.steps(), default=save.step), ""
        if newest > save.step:
            later = (
                f"{self.folder.of_step(newest)} is of a later step than {save.step}, which is saved now, and will be "
                "loaded instead of it. Remove the later ones, or save in another folder"
            )
        return {"kept": kept, "later": later}

    def _warn(self, found: Mapping[str, str]) -> None:
        """Warn of each sort once."""
        for sort, problem in found.items():
            if problem and sort not in self._warned:
                self._warned.add(sort)
                warn(problem)

    def _make_room(self, step: int) -> None:
        """Set a damaged checkpoint of the same step aside; one that verifies stays, and is not written over."""
        path = self.folder.of_step(step)
        if not path.exists():
            return
        try:
            verify(path)
        except CheckpointError:
            self.folder.set_aside(step)

    def _manifest(self, everyone: Sequence[Described], owned: Sequence[frozenset[str]], **own: Any) -> Manifest:
        """Return the manifest without its files; `own` are fields of it."""
        return Manifest(
            penstock=VERSION,
            pipeline_steps=self._pipeline.step_number,
            ranks=len(everyone),
            replicas=self._pipeline.num_replicas,
            schedule=self._pipeline.schedule.name,
            weights={
                name: TensorEntry(dtype=dtype, shape=shape, file=file_name(WEIGHTS, rank, len(everyone)))
                for rank, theirs in enumerate(everyone)
                for name, (dtype, shape) in theirs["weights"].items()
                if name in owned[rank]
            },
            optimizer=_optimizer_entry(everyone, owned),
            files={},
            **own,
        )


@dataclass(slots=True, eq=False)
class _Save:
    """One checkpoint in flight, on one rank."""

    partial: Path
    step: int
    num_bytes: int
    written: Future[Files]
    manifest: Manifest | None
    """On rank 0, without the files."""
    announced: Future[dict[str, str]] | None = None

    @property
    def current(self) -> Future[Any]:
        """The work that is waited for now."""
        return self.written if self.announced is None else self.announced

    def files(self) -> Files | None:
        """Return the files that this rank has written, or nothing for those announced; None while either goes on.

        Raises: what the one or the other failed with.
        """
        if not self.current.done():
            return None
        found = self.current.result()
        return found if self.announced is None else {}


def _write_files(folder: Path, parts: Mapping[str, Mapping[str, Tensor]], rank: int, num_ranks: int) -> Files:
    names = {file_name(part, rank, num_ranks): tensors for part, tensors in parts.items() if tensors}
    return {name: write_shard(folder / name, tensors).model_dump() for name, tensors in names.items()}


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    flush(path)


def _optimizer_entry(everyone: Sequence[Described], owned: Sequence[frozenset[str]]) -> OptimizerEntry | None:
    # A rank without trained parameters may have none.
    optimizer = next((theirs["optimizer"] for theirs in everyone if theirs["optimizer"]), "")
    if not optimizer:
        return None
    state = {
        name: ParameterState(
            tensors={
                key: TensorEntry(dtype=dtype, shape=shape, file=file_name(OPTIMIZER, rank, len(everyone)))
                for key, (dtype, shape) in kept.items()
            },
            values=theirs["values"][name],
        )
        for rank, theirs in enumerate(everyone)
        for name, kept in theirs["state"].items()
        if name in owned[rank]
    }
    groups = merged_groups([theirs["groups"] for theirs in everyone], owned)
    return OptimizerEntry(name=optimizer, groups=groups, state=state)


def _json_of(extra: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(extra, sort_keys=True)
    except (TypeError, ValueError) as error:
        problem = f"`extra` is not JSON: {error}. Save tensors with the model, and the rest as text"
        raise NotSaved(problem) from error
    if not _has_text_keys(extra):
        raise NotSaved("`extra` has a key that is not text, which JSON turns into text; convert it before")
    return text


def _has_text_keys(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _has_text_keys(item) for key, item in value.items())
    return not isinstance(value, list | tuple) or all(map(_has_text_keys, value))


@collective
def save_checkpoint(
    folder: str | Path,
    pipeline: Pipeline,
    optimizer: Optimizer | None = None,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    keep: int = 0,
) -> None:
    """Write the model's and the optimizer's state of all ranks into `folder/step-N`; every rank calls it.

    The folder has this name when it is whole and on the disk, and that is when this returns; a checkpoint that is
    there is never written over; `latest_checkpoint` tells before training which is the newest. With `keep`, only so
    many checkpoints stay, this one and those of the steps before it; 0 keeps all. Every rank writes what it holds, so
    all need to see the folder. The optimizer is this rank's. `extra` is JSON, the same on all ranks: what else the loop
    needs, such as a scheduler's state. Saved, too: where the random numbers of every rank are. No pickle is written.

    Raises:
        CheckpointError: on every rank, if anything cannot be saved on any, or the folder cannot be written.
        PipelineError: a rank is lost.
    """
    CheckpointWriter(folder, pipeline, optimizer, keep_last=keep, asynchronous=False).save(step, extra)
