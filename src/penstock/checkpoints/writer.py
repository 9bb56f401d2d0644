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
    RankDescription,
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
from penstock.checkpoints.module_settings import joined_settings
from penstock.checkpoints.optimizer_state import merged_groups
from penstock.checkpoints.random_state import random_state
from penstock.checkpoints.rebuilt import joined_sums, local_sums
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
from penstock.execute.arguments import is_whole_number
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
        self._warned_sorts: set[str] = set()
        """The sorts of problems that a warning has named, of those in `_announce`."""

    @collective
    def save(self, step: int, extra: Mapping[str, Any] | None = None) -> None:
        """Save all that continuing after `step` needs; `extra` is JSON, the same on all ranks. Every rank calls it.

        It first waits until the last save is over, since only one is in flight. Then it copies what this rank writes,
        and returns while a thread writes the files, unless the writer is not asynchronous.

        Raises:
            NotSaved: on every rank, where something cannot be saved, or this save or the last one cannot be written.
            PipelineError: a rank is lost, or copies of a parameter have drifted apart.
        """
        self.finish()
        self._pipeline.require_equal_copies()
        control, extra_values = self.control, dict(extra or {})

        def check_and_describe() -> tuple[Any, ...]:
            if not is_whole_number(step, 0):
                raise NotSaved(f"step: {described(step)}; expected a whole number, at least 0")
            if not is_whole_number(keep := self._keep["keep_last"], 0):
                raise NotSaved(f"keep: {described(keep)}; expected a number of checkpoints, or 0 for all")
            pipeline = self._pipeline
            own_facts = random_state(pipeline.device), local_sums(pipeline), pipeline.module_settings
            return step, _json_of(extra_values), *own_facts

        # All ranks describe their tensors, and must agree on the step and on `extra`. The further facts of a rank may
        # differ: its random state, the sums of what it does not save, and the settings of its modules.
        content, descriptions, facts = gather_content(
            self._pipeline, self._optimizer, check_and_describe, skip=self._pipeline.rebuilt_names
        )
        for argument, values in zip(("step", "`extra`"), zip(*facts, strict=True), strict=False):
            require_equal_on_ranks(argument, values, self.folder.path, control.names)
        *_, random, sums, settings = map(list, zip(*facts, strict=True))
        fields = {"step": step, "extra": extra_values, "random": random, "rebuilt": joined_sums(sums)}
        fields["settings"] = joined_settings(settings)
        names_by_rank = owned_names(descriptions)
        staged = stage(self._staging, self._pipeline, content, names_by_rank)
        manifests: list[Manifest] = []

        def begin_on_rank_0() -> str:
            manifests.append(self._manifest(descriptions, names_by_rank, **fields))
            with naming_file(self.folder.path):
                return str(self.folder.begin(step))

        # Rank 0 makes a folder under a temporary name, and each rank writes its files there.
        partial = Path(control.on_rank_0(begin_on_rank_0, _AS_NOT_SAVED))
        files_future = run_in_thread(lambda: _write_files(partial, staged, control.rank, control.num_ranks))
        self._save = _Save(partial, step, self._staging.num_bytes, files_future, next(iter(manifests), None))
        if not self._is_asynchronous:
            self.finish()

    @collective
    def poll(self) -> None:
        """Announce the checkpoint in flight if all its files are written by now; a collective, without a wait.

        Raises: the errors of `save`, where the checkpoint in flight fails.
        """
        if self._save is not None:
            self._advance(self._save)

    @collective
    def finish(self, limit_s: float | None = None) -> bool:
        """Wait until the checkpoint in flight is announced; return whether it is. A collective.

        Raises: the errors of `save`; also NotSaved where a disk does not answer and no `limit_s` is given.
        """
        # Two rounds at most: the files of all ranks are written, then rank 0 has announced them.
        while (save := self._save) is not None:
            wait_s = longest_s(save.num_bytes) if limit_s is None else limit_s
            if not wait_together(self.control, save.current, limit_s=wait_s):
                if limit_s is not None:
                    return False
                self._save = None
                raise NotSaved(f"{save.partial}: a disk took more than {wait_s:.0f} s for it. See to it")
            self._advance(save)
        return True

    @property
    def control(self) -> Control:
        """The collectives of the pipeline that is saved."""
        return self._pipeline.control

    # ---- one save

    def _advance(self, save: "_Save") -> None:
        """Gather how far all ranks are, and announce the checkpoint when all have written their files.

        Every rank calls it, once with the files that it writes and again while rank 0 announces the checkpoint.
        """
        try:
            files_by_rank = self.control.together(save.files, _AS_NOT_SAVED)
        except PipelineError:  # a rank is lost
            raise
        except Exception:
            self._save = None
            if self.control.rank == 0:
                shutil.rmtree(save.partial, ignore_errors=True)
            raise
        if None in files_by_rank:  # a rank is still at work
            return
        if save.announcement is not None:
            self._save = None
            self._warn(save.announcement.result())
            return
        files = {name: entry for rank_files in files_by_rank for name, entry in rank_files.items()}
        manifest = save.manifest  # None but on rank 0, which alone announces
        save.announcement = run_in_thread(lambda: {} if manifest is None else self._announce(save, files, manifest))

    def _announce(self, save: "_Save", files: Files, manifest: Manifest) -> dict[str, str]:
        """Write the index and the manifest, and give the checkpoint's folder its name; return warnings by their sort.

        Rank 0 calls it in a thread, when all ranks have written their `files`. It removes old checkpoints at last. A
        warning is an empty text where there is nothing to warn of.
        """
        path = save.partial
        try:
            entries = {name: FileEntry(**fields) for name, fields in files.items()}
            for name, entry in entries.items():
                require_visible(path / name, entry.num_bytes)
            _write_and_flush(path / INDEX, index_bytes(manifest.weights))
            entries[INDEX] = record_of(path / INDEX)
            manifest_with_files = manifest.model_copy(update={"files": dict(sorted(entries.items()))})
            _write_and_flush(path / MANIFEST, manifest_bytes(manifest_with_files))
            self._make_room(save.step)
            self.folder.announce(path, save.step)
        except OSError as error:
            raise cannot_write(Path(error.filename or path), error) from error
        # The new checkpoint is whole, so an old one that cannot be removed is no reason to end a training.
        problem = self.folder.retain(save.step, **self._keep)
        kept_warning = problem and f"{problem}. It stays; later saves try again, and warn no more. Remove it yourself"
        newest, later_warning = max(self.folder.steps(), default=save.step), ""
        if newest > save.step:
            later_warning = (
                f"{self.folder.of_step(newest)} is of a later step than {save.step}, which is saved now, and will be "
                "loaded instead of it. Remove the later ones, or save in another folder"
            )
        return {"kept": kept_warning, "later": later_warning}

    def _warn(self, problems_by_sort: Mapping[str, str]) -> None:
        """Warn of the first problem of each sort, and of no further one of that sort."""
        for sort, problem in problems_by_sort.items():
            if problem and sort not in self._warned_sorts:
                self._warned_sorts.add(sort)
                warn(problem)

    def _make_room(self, step: int) -> None:
        """Rename a damaged checkpoint of the same step; one that verifies stays, and is not written over."""
        path = self.folder.of_step(step)
        if not path.exists():
            return
        try:
            verify(path)
        except CheckpointError:
            self.folder.set_aside(step)

    def _manifest(
        self, descriptions: Sequence[RankDescription], names_by_rank: Sequence[frozenset[str]], **fields: Any
    ) -> Manifest:
        """Return the manifest without its files; `fields` are those of it that the descriptions do not tell."""
        return Manifest(
            penstock=VERSION,
            pipeline_steps=self._pipeline.step_number,
            ranks=len(descriptions),
            replicas=self._pipeline.num_replicas,
            schedule=self._pipeline.schedule.name,
            weights={
                name: TensorEntry(dtype=dtype, shape=shape, file=file_name(WEIGHTS, rank, len(descriptions)))
                for rank, description in enumerate(descriptions)
                for name, (dtype, shape) in description["weights"].items()
                if name in names_by_rank[rank]
            },
            optimizer=_optimizer_entry(descriptions, names_by_rank),
            files={},
            **fields,
        )


@dataclass(slots=True, eq=False)
class _Save:
    """One checkpoint in flight, on one rank."""

    partial: Path
    step: int
    num_bytes: int
    """The bytes that this rank writes."""
    files_future: Future[Files]
    """The thread that writes this rank's files."""
    manifest: Manifest | None
    """The manifest without its files, on rank 0; None on the others."""
    announcement: Future[dict[str, str]] | None = None
    """The thread that announces the checkpoint, once all ranks have written; it does nothing but on rank 0."""

    @property
    def current(self) -> Future[Any]:
        """The thread that is at work now."""
        return self.files_future if self.announcement is None else self.announcement

    def files(self) -> Files | None:
        """Return the files that this rank has written; none once they are announced, and None while a thread works.

        Raises: the error with which the thread failed.
        """
        if not self.current.done():
            return None
        files = self.current.result()
        return files if self.announcement is None else {}


def _write_files(folder: Path, parts: Mapping[str, Mapping[str, Tensor]], rank: int, num_ranks: int) -> Files:
    names = {file_name(part, rank, num_ranks): tensors for part, tensors in parts.items() if tensors}
    return {name: write_shard(folder / name, tensors).model_dump() for name, tensors in names.items()}


def _write_and_flush(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    flush(path)


def _optimizer_entry(
    descriptions: Sequence[RankDescription], names_by_rank: Sequence[frozenset[str]]
) -> OptimizerEntry | None:
    # A rank without trained parameters may have none.
    optimizer = next((description["optimizer"] for description in descriptions if description["optimizer"]), "")
    if not optimizer:
        return None
    state = {
        name: ParameterState(
            tensors={
                key: TensorEntry(dtype=dtype, shape=shape, file=file_name(OPTIMIZER, rank, len(descriptions)))
                for key, (dtype, shape) in tensor_types.items()
            },
            values=description["values"][name],
        )
        for rank, description in enumerate(descriptions)
        for name, tensor_types in description["state"].items()
        if name in names_by_rank[rank]
    }
    groups = merged_groups([description["groups"] for description in descriptions], names_by_rank)
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
