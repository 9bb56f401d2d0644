"""Loading a checkpoint into any number of ranks, schedule, split and placement: a rank reads what it holds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from penstock.checkpoints.agreement import failing_as
from penstock.checkpoints.content import SAME_MODEL, SEPARATOR, names_in_checkpoint, require_same_names
from penstock.checkpoints.manifest import Manifest, TensorEntry
from penstock.checkpoints.optimizer_state import load_optimizer, require_loadable
from penstock.checkpoints.random_state import random_state_restorer
from penstock.checkpoints.shards import dtype_name, read_tensors
from penstock.checkpoints.verification import Found, find_newest
from penstock.checkpoints.work import run_together
from penstock.errors import CheckpointError, warn
from penstock.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded, the same on every rank."""

    path: Path
    step: int
    extra: dict[str, Any]
    damaged: tuple[str, ...]
    """What is wrong with newer checkpoints, which were left out."""


def load_checkpoint(folder: str | Path, pipeline: Pipeline, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Load `folder`, or the newest checkpoint `folder/step-N` that verifies; return its `extra`. Every rank calls it.

    The pipeline may have any number of ranks, schedule and split, the optimizer is this rank's. Without one, the
    weights alone are loaded. A damaged checkpoint is named in a warning, and the next older one is taken. Nothing is
    changed before every rank has found all that it needs. Random numbers continue where they were if the number of
    ranks is the same.

    Raises:
        CheckpointError: on every rank: there is none that is whole; it is of another model, optimizer or format; or it
            holds a pickle.
        PipelineError: a rank is lost.
    """
    loaded = load_newest(Path(folder), pipeline, optimizer)
    if pipeline.control.rank == 0:
        for problem in loaded.damaged:
            warn(f"{problem}. {loaded.path} is loaded instead")
    return loaded.extra


def load_newest(folder: Path, pipeline: Pipeline, optimizer: Optimizer | None = None) -> Loaded:
    """Load as `load_checkpoint` does, and say what was loaded. Raises: as `load_checkpoint`."""
    control, fails_as = pipeline.control, failing_as(CheckpointError)
    found = find_newest(control, folder)
    own_names = names_in_checkpoint(pipeline, control.together(lambda: dict(pipeline.owner_names), fails_as))
    reader = _Reader(found, pipeline, optimizer, own_names)
    wanted = {name for names in control.together(reader.wanted, fails_as) for name in names}
    control.together(lambda: reader.require_fitting(wanted), fails_as)
    tensors = run_together(control, reader.read, num_bytes=found.manifest.num_bytes, what=str(found.path))
    reader.load(tensors)
    return Loaded(found.path, found.manifest.step, found.manifest.extra, found.damaged)


class _Reader:
    """One rank's part of a checkpoint."""

    def __init__(
        self, found: Found, pipeline: Pipeline, optimizer: Optimizer | None, own_names: Mapping[str, str]
    ) -> None:
        self._path = found.path
        self._manifest: Manifest = found.manifest
        self._pipeline = pipeline
        self._optimizer = optimizer
        self._own = own_names
        """Of every tensor of this rank, its name in the checkpoint."""
        self._restore_random: Callable[[], None] | None = None
        self._parameters = {id(parameter): own_names[name] for name, parameter in pipeline.named_parameters()}

    def wanted(self) -> list[str]:
        """Return the names that this rank looks for."""
        return list(self._own.values())

    def require_fitting(self, wanted: set[str]) -> None:
        """Compare the checkpoint with the model, of which all ranks together want these names; change nothing yet.

        Raises: CheckpointError, which names what differs.
        """
        saved = self._manifest.weights
        require_same_names(self._path, saved, wanted)
        for name, tensor in self._pipeline.state_dict().items():
            _require_alike(self._path, self._own[name], saved[self._own[name]], tensor)
        if self._optimizer is not None:
            require_loadable(self._optimizer, self._manifest.optimizer, self._parameters, self._path)
        if len(self._manifest.random) == self._pipeline.control.num_ranks:
            state = self._manifest.random[self._pipeline.control.rank]
            try:
                self._restore_random = random_state_restorer(state, self._pipeline.device)
            except CheckpointError as error:
                raise CheckpointError(f"{self._path}: {error}") from error

    def read(self) -> dict[str, Tensor]:
        """Return this rank's tensors by their names in files. Raises: CheckpointError."""
        wanted = {name: self._manifest.weights[name] for name in self._own.values()}
        if self._optimizer is not None and self._manifest.optimizer is not None:
            for name in self._parameters.values():
                state = self._manifest.optimizer.state.get(name)
                wanted |= {f"{name}{SEPARATOR}{key}": entry for key, entry in state.tensors.items()} if state else {}
        by_file: dict[str, list[str]] = {}
        for name, entry in wanted.items():
            by_file.setdefault(entry.file, []).append(name)
        read: dict[str, Tensor] = {}
        for file, names in by_file.items():
            read |= read_tensors(self._path / file, names)
        return read

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Change the model, the optimizer and the random numbers. Every rank calls it. Raises: PenstockError."""
        pipeline, manifest = self._pipeline, self._manifest
        pipeline.load_state_dict({name: tensors[saved] for name, saved in self._own.items()})
        pipeline.step_number = manifest.pipeline_steps
        if self._optimizer is not None and manifest.optimizer is not None:
            state = {
                name: {key: tensors[f"{name}{SEPARATOR}{key}"] for key in manifest.optimizer.state[name].tensors}
                for name in self._parameters.values()
                if name in manifest.optimizer.state
            }
            pipeline.control.together(
                lambda: load_optimizer(self._optimizer, manifest.optimizer, state, self._parameters),  # type: ignore[arg-type]
                failing_as(CheckpointError),
            )
        if self._restore_random is not None:
            self._restore_random()


def _require_alike(path: Path, name: str, saved: TensorEntry, tensor: Tensor) -> None:
    own = (dtype_name(name, tensor), list(tensor.shape))
    if own != (saved.dtype, saved.shape):
        raise CheckpointError(
            f"{path}: is of another model: {name!r} is {saved.dtype} {tuple(saved.shape)} in it, but {own[0]} "
            f"{tuple(own[1])} in the model. {SAME_MODEL}"
        )
