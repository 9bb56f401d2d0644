"""The checkpoints of a run: what it continues from, when one is saved, and stopping between two steps.

A step's number and the seed determine its batch and its learning rate, so nothing has to be read again. With every
checkpoint are the last losses, what the optimizer step keeps beside tensors, and the digest of the text.
"""

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

from penstock.checkpoints.folder import CheckpointFolder, step_of
from penstock.checkpoints.loading import load_newest
from penstock.checkpoints.pretrained import load_weights
from penstock.checkpoints.verification import FoundCheckpoint
from penstock.checkpoints.weight_files import require_saveable
from penstock.checkpoints.writer import CheckpointWriter
from penstock.errors import CheckpointError, NotSaved, PenstockError
from penstock.files import naming_storage
from penstock.pipeline import Pipeline
from penstock.show.text import format_bytes
from penstock.train.data.user_data import Dataset, UserDataset
from penstock.train.folder.run_folder import CONFIG, HeldFolder, RunFolder, next_folder
from penstock.train.settings.config import RunConfig, load_config
from penstock.train.step import Trainer
from penstock.train.stopping import EarlyStop, StopRequest
from penstock.train.together import same_words, working_together


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come."""

    step: int = 0
    """The last optimizer step that was run; 0 before the first."""
    loss: float | None = None
    held_out_loss: float | None = None


def begin_with_weights(config: RunConfig, folder: RunFolder, pipeline: Pipeline, output: TextIO) -> None:
    """Load the weights that a run is to begin with, unless it continues; every rank calls it.

    Raises: CheckpointError, on every rank, where there are none or they are of another model.
    """
    if config.checkpoint.load and not _has_checkpoints(pipeline, folder):
        weights_path = load_weights(Path(config.checkpoint.load), pipeline)
        if pipeline.control.rank == 0:
            output.write(f"the weights are those of {weights_path}\n")
            if _has_other_tokenizer(Path(config.checkpoint.load), config):
                output.write(
                    f"note: they were trained with another tokenizer file than {config.data.tokenizer}; a token may "
                    "stand for other text than before\n"
                )


def _has_other_tokenizer(path: Path, config: RunConfig) -> bool:
    """Whether `path` is the folder of a run with another tokenizer file; other weights say nothing of a tokenizer."""
    try:
        digest = load_config(path / CONFIG).data.tokenizer_digest
    except PenstockError:
        return False
    return digest not in ("", config.data.tokenizer_digest)


class RunCheckpoints:
    """Saves a run's checkpoints, and loads the newest; every rank has one and calls it alike."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        trainer: Trainer,
        early_stop: EarlyStop,
        stop: StopRequest,
        *,
        data: Dataset,
        output: TextIO,
    ) -> None:
        """Keep what checkpoints are made of, and make sure before the first step that they can be written.

        Every rank calls it. `trainer` has the pipeline and the optimizer, and `early_stop` and `data` have states that
        a run continues with. Raises: PenstockError, on every rank.
        """
        # When and where to save; ranks wait for each other `_limit_s` seconds at most.
        self._config = config
        self._options = config.checkpoint
        self._limit_s = config.run.deadline_s
        self._folder = folder
        # What is saved: the pipeline's weights, and the states of the optimizer, of early stopping and of the data.
        self._update = trainer.update
        self._early_stop = early_stop
        self._pipeline = trainer.pipeline
        self._data = data
        # How ranks agree, whether a signal asks the run to stop, and where messages to people go.
        self._control = trainer.pipeline.control
        self._stop = stop
        self._output = output
        self._last_saved_step = 0
        # Rank 0 holds the folder open, to find it again after somebody has renamed it.
        self._held_folder = HeldFolder(folder.path) if self._control.rank == 0 else None
        self._writer = self._writer_to(folder)
        # Rank 0 tries whether the folder has room for a checkpoint of this size.
        num_bytes = require_saveable(self._pipeline)
        if self._options.every:
            probe = partial(_require_writable, folder.checkpoints, num_bytes)
            self._control.on_rank_0(probe, same_words)

    def resume(self) -> Progress:
        """Load the newest checkpoint that verifies, if the run has any; return how far it had come.

        Damaged ones that are newer are named, and set aside.

        Raises: CheckpointError, on every rank: none verifies, or the text is another one.
        """
        if not _has_checkpoints(self._pipeline, self._folder):
            return Progress()
        loaded = load_newest(self._folder.checkpoints.path, self._pipeline, self._update.optimizer)
        step, extra = loaded.manifest.step, loaded.manifest.extra
        if extra.get("data") != self._data.digest:
            raise CheckpointError(
                f"{loaded.path}: was trained on another text, or with another tokenizer or chat template: the files of "
                "data.files, data.tokenizer or data.source have changed. Put them back, or begin in the next folder "
                "with --fresh"
            )
        self._control.on_rank_0(lambda: self._go_on(loaded), same_words)
        self._last_saved_step = step
        self._update.load_state(extra["update"])
        self._early_stop.lowest, self._early_stop.num_since = extra["early_stop"]
        self._resume_data(step, extra.get("source"))
        return Progress(step, extra["loss"], extra["held_out_loss"])

    def after_step(self, progress: Progress, *, is_last: bool) -> None:
        """Save a checkpoint if one is due after the step; a collective after every step.

        Raises:
            KeyboardInterrupt: on every rank, if one was asked to stop; the checkpoint is saved then.
            CheckpointError: on every rank, if one cannot be written.
            PenstockError: on every rank, if the run folder was renamed or removed; the checkpoint is saved then.
        """
        local_flags = [self._stop.is_requested, self._is_moved]
        flags_by_rank: list[Any] = self._control.all_gather_object(local_flags)
        is_stopped = any(is_requested for is_requested, _ in flags_by_rank)
        if flags_by_rank[0][1]:
            self._leave_moved(progress)
        every, step = self._options.every, progress.step
        if every and (step % every == 0 or is_last or is_stopped):
            self._unless_moved(progress, lambda: self._save(progress))
        else:
            self._unless_moved(progress, self._writer.poll)
        if is_stopped:
            self._finish_stopped(progress)

    def finish(self, progress: Progress) -> None:
        """Wait until the last checkpoint is announced; every rank calls it. Raises: as `after_step`."""
        self._unless_moved(progress, self._writer.finish)

    def _writer_to(self, folder: RunFolder) -> CheckpointWriter:
        return CheckpointWriter(
            folder.checkpoints.path,
            self._pipeline,
            self._update.optimizer,
            keep_last=self._options.keep_last,
            keep_every=self._options.keep_every,
            asynchronous=self._options.asynchronous,
        )

    @property
    def _is_moved(self) -> bool:
        """Whether the run folder was renamed or removed; rank 0 knows it."""
        return self._held_folder is not None and not self._held_folder.is_in_place

    def _unless_moved(self, progress: Progress, save: Callable[[], object]) -> None:
        try:
            save()
        except NotSaved:  # on every rank
            if self._control.all_gather_object(self._is_moved)[0]:
                self._leave_moved(progress)
            raise

    def _leave_moved(self, progress: Progress) -> NoReturn:
        """Save a checkpoint where the run folder is now, and end the run: its other files have lost their place.

        A folder that was removed is made again, or the next number where the name is taken. Raises: PenstockError.
        """
        with suppress(CheckpointError):
            # A checkpoint under way is written to the folder that is gone, so it may fail.
            self._writer.finish(limit_s=self._limit_s)
        folder, change = self._control.on_rank_0(self._find_or_begin, same_words)
        self._writer, self._last_saved_step = self._writer_to(RunFolder(Path(folder))), 0
        self._save(progress)
        self._writer.finish()
        raise PenstockError(
            f"{self._folder.path} was {change} during the run, which ends here. Step {progress.step} is saved in "
            f"{folder}: continue with --set run.folder={folder}"
        )

    def _find_or_begin(self) -> tuple[str, str]:
        """Return the run folder's present path, and whether it was renamed or removed; rank 0 calls it."""
        assert self._held_folder is not None
        if current_path := self._held_folder.current_path():
            return str(current_path), "renamed"
        replacement = next_folder(self._folder.path)
        RunFolder(replacement).begin(self._config)
        return str(replacement), "removed"

    def _save(self, progress: Progress) -> None:
        if progress.step == self._last_saved_step:
            return
        extra = {
            "loss": progress.loss,
            "held_out_loss": progress.held_out_loss,
            "data": self._data.digest,
            "source": self._source_state(progress.step),
            "update": self._update.state(),
            "early_stop": [self._early_stop.lowest, self._early_stop.num_since],
        }
        self._writer.save(progress.step, extra)
        self._last_saved_step = progress.step

    def _source_state(self, step: int) -> Any:
        """Return the state of the data behind a step, where they have one; a collective there."""
        if not isinstance(self._data, UserDataset) or not self._data.is_stateful:
            return None
        states = self._control.all_gather_object(self._data.state(step))
        return next((state for state in states if state is not None), None)

    def _resume_data(self, step: int, state: Any) -> None:
        """Go on in the data where a checkpoint was; passing over batches may take any time."""
        if isinstance(self._data, UserDataset):
            note = working_together(self._control, partial(self._data.resume, step, state))
            if note and self._control.rank == 0:
                self._output.write(f"{note}\n")

    def _finish_stopped(self, progress: Progress) -> None:
        is_saved = self._writer.finish(limit_s=self._limit_s) and self._options.every > 0
        if self._control.rank == 0:
            checkpoint_note = "its checkpoint is saved" if is_saved else "no checkpoint of it was saved"
            self._output.write(f"stopped by a signal after step {progress.step}; {checkpoint_note}\n")
        raise KeyboardInterrupt

    def _go_on(self, loaded: FoundCheckpoint) -> None:
        path = loaded.path
        for problem in loaded.damaged:
            self._output.write(f"warning: {problem}\n")
        newest = step_of(path) or 0
        for step in [step for step in self._folder.checkpoints.steps() if step > newest]:
            with naming_storage(path):
                aside = self._folder.checkpoints.set_aside(step)
            self._output.write(f"warning: the damaged checkpoint is now {aside}\n")
        self._output.write(f"continuing after step {newest} from {path}\n")
        self._output.flush()
        self._folder.go_on(self._config)


def _has_checkpoints(pipeline: Pipeline, folder: RunFolder) -> bool:
    """Return what rank 0 sees, so that all ranks do the same."""
    return bool(pipeline.control.on_rank_0(lambda: bool(folder.checkpoints.steps()), same_words))


def _require_writable(checkpoints: CheckpointFolder, num_bytes: int) -> None:
    """Write a file and look for so much space, so that the first checkpoint does not fail after hours."""
    with naming_storage(checkpoints.path):
        probe = checkpoints.begin(0)
        (probe / "file.json").write_bytes(b"{}")
        shutil.rmtree(probe)
        free_bytes = shutil.disk_usage(checkpoints.path).free
    if free_bytes < num_bytes:
        raise NotSaved(
            f"{checkpoints.path}: the disk has {format_bytes(free_bytes)} left, and a checkpoint takes more than the "
            f"{format_bytes(num_bytes)} of the weights. Free some space, or choose another folder"
        )
