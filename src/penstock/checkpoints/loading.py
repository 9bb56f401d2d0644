"""Loading a checkpoint into any number of ranks and replicas, schedule and split: a rank reads what it holds."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from penstock.checkpoints.agreement import failing_as, run_together
from penstock.checkpoints.content import (
    SAME_MODEL,
    SEPARATOR,
    held_weights,
    names_in_checkpoint,
    require_same_names,
)
from penstock.checkpoints.held import Held, alike
from penstock.checkpoints.manifest import Manifest, TensorEntry
from penstock.checkpoints.optimizer_state import STEP, load_optimizer, require_loadable
from penstock.checkpoints.random_state import random_state_restorer
from penstock.checkpoints.shards import dtype_name, read_files
from penstock.checkpoints.verification import FoundCheckpoint, find_newest
from penstock.errors import CheckpointError, warn
from penstock.execute.transport.calls import collective
from penstock.pipeline import Pipeline


@collective
def load_checkpoint(folder: str | Path, pipeline: Pipeline, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Load `folder`, or the newest checkpoint `folder/step-N` that verifies; return its `extra`. Every rank calls it.

    The pipeline may have any number of ranks and replicas, schedule, split and shards, the optimizer is this rank's.
    Without one, the weights alone are loaded. A damaged checkpoint is named in a warning, and the next older one is
    taken. Nothing is changed before every rank has found all that it needs. Random numbers continue where they were if
    the numbers of ranks and replicas are the same.

    Raises:
        CheckpointError: on every rank: there is none that is whole; it is of another model, optimizer or format; or it
            holds a pickle.
        PipelineError: a rank is lost.
    """
    loaded = load_newest(Path(folder), pipeline, optimizer)
    if pipeline.control.rank == 0:
        for problem in loaded.damaged:
            warn(f"{problem}. {loaded.path} is loaded instead")
    return loaded.manifest.extra


@collective
def load_newest(folder: Path, pipeline: Pipeline, optimizer: Optimizer | None = None) -> FoundCheckpoint:
    """Load as `load_checkpoint` does, and say what was loaded, the same on every rank. Raises: as `load_checkpoint`."""
    control, fails_as = pipeline.control, failing_as(CheckpointError)
    found = find_newest(control, folder)
    own = own_tensors(pipeline)
    reader = _Reader(found, pipeline, optimizer, own)
    everyone = control.together(lambda: list(own.names.values()), fails_as)
    wanted = {name for names in everyone for name in names}
    control.together(lambda: reader.require_fitting(wanted), fails_as)
    tensors = run_together(control, reader.read, num_bytes=found.manifest.num_bytes, what=str(found.path))
    reader.load(tensors)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class OwnTensors:
    """The part of the weights that one rank reads."""

    names: Mapping[str, str]
    """Of every tensor of this rank, its name in files."""
    held: Mapping[str, Held]
    """By this rank's names."""

    def rows(self) -> dict[str, range]:
        """Return, by name in files, which rows of a tensor this rank reads, where it does not read all of it."""
        rows = {saved: self.held[name].rows for name, saved in self.names.items()}
        return {saved: own for saved, own in rows.items() if own is not None}

    def load(self, pipeline: Pipeline, tensors: Mapping[str, Tensor]) -> None:
        """Copy what was read, by its names in files, into the model. Every rank calls it. Raises: PenstockError."""
        current = pipeline.state_dict()
        own = {name: alike(current[name], tensors[saved]) for name, saved in self.names.items()}
        pipeline.load_state_dict(own)


def own_tensors(pipeline: Pipeline) -> OwnTensors:
    """Look at what this rank holds; every rank calls it. Raises: CheckpointError, on every rank."""
    held: dict[str, Held] = {}

    def look() -> dict[str, str]:
        held.update(held_weights(pipeline.state_dict(), pipeline.control.places))
        return dict(pipeline.owner_names)

    everyone = pipeline.control.together(look, failing_as(CheckpointError))
    return OwnTensors(names_in_checkpoint(pipeline, everyone), held)


class _Reader:
    """One rank's part of a checkpoint."""

    def __init__(
        self, found: FoundCheckpoint, pipeline: Pipeline, optimizer: Optimizer | None, own: OwnTensors
    ) -> None:
        self._path = found.path
        self._manifest: Manifest = found.manifest
        self._pipeline = pipeline
        self._optimizer = optimizer
        self._own = own
        self._restore_random: Callable[[], None] | None = None
        self._parameters = {
            own.names[name]: (parameter, own.held[name]) for name, parameter in pipeline.named_parameters()
        }
        """By name in the checkpoint."""
        self._scalars = _scalars(found.manifest)
        self._names = {id(parameter): name for name, (parameter, _) in self._parameters.items()}

    def require_fitting(self, wanted: set[str]) -> None:
        """Compare the checkpoint with the model, of which all ranks together want these names; change nothing yet.

        Raises: CheckpointError, which names what differs.
        """
        saved = self._manifest.weights
        require_same_names(self._path, saved, wanted)
        for own_name, held in self._own.held.items():
            name = self._own.names[own_name]
            entry, own = saved[name], (dtype_name(name, held.local), list(held.shape))
            if own != (entry.dtype, entry.shape):
                raise CheckpointError(
                    f"{self._path}: is of another model: {name!r} is {entry.dtype} {tuple(entry.shape)} in it, but "
                    f"{own[0]} {tuple(own[1])} in the model. {SAME_MODEL}"
                )
        if self._optimizer is not None:
            require_loadable(self._optimizer, self._manifest.optimizer, self._names, self._path)
        control = self._pipeline.control
        saved_on = len(self._manifest.random), self._manifest.replicas
        if saved_on == (control.num_ranks, control.places.num_replicas):
            state = self._manifest.random[control.rank]
            try:
                self._restore_random = random_state_restorer(state, self._pipeline.device)
            except CheckpointError as error:
                raise CheckpointError(f"{self._path}: {error}") from error

    def read(self) -> dict[str, Tensor]:
        """Return this rank's tensors, or its rows of them, by their names in files. Raises: CheckpointError."""
        wanted = {name: self._manifest.weights[name] for name in self._own.names.values()}
        rows = self._own.rows()
        for name, key, entry in self._state_entries():
            wanted[f"{name}{SEPARATOR}{key}"] = entry
            held = self._parameters[name][1]
            if held.rows is not None and self._lies_like(held, key, entry):
                rows[f"{name}{SEPARATOR}{key}"] = held.rows
        return read_files({name: self._path / entry.file for name, entry in wanted.items()}, rows)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Change the model, the optimizer and the random numbers. Every rank calls it. Raises: PenstockError."""
        pipeline, manifest = self._pipeline, self._manifest
        self._own.load(pipeline, tensors)
        pipeline.step_number = manifest.pipeline_steps
        # Also on a rank without an optimizer, such as one without trained parameters: the others wait for it.
        pipeline.control.together(lambda: self._load_optimizer(tensors), failing_as(CheckpointError))
        if self._restore_random is not None:
            self._restore_random()

    def _load_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        """Put this rank's optimizer where the checkpoint was, if it has one. Raises: CheckpointError."""
        saved = self._manifest.optimizer
        if self._optimizer is not None and saved is not None:
            load_optimizer(self._optimizer, saved, self._state(tensors), self._names)

    def _state(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Return what the optimizer takes of what was read, as it keeps it, by name of a parameter."""
        saved = self._manifest.optimizer
        kept = {} if saved is None else saved.state
        state: dict[str, dict[str, Tensor]] = {name: {} for name in self._parameters if name in kept}
        for name, key, entry in self._state_entries():
            parameter, held = self._parameters[name]
            tensor = tensors[f"{name}{SEPARATOR}{key}"]
            state[name][key] = alike(parameter, tensor) if self._lies_like(held, key, entry) else tensor
        return state

    def _state_entries(self) -> Iterator[tuple[str, str, TensorEntry]]:
        """List the tensors that the optimizer takes: the name of the parameter, that of the tensor, and which it is."""
        saved = self._manifest.optimizer
        if self._optimizer is None or saved is None:
            return
        for name in self._parameters:
            if name in saved.state:
                yield from ((name, key, entry) for key, entry in saved.state[name].tensors.items())

    def _lies_like(self, held: Held, key: str, entry: TensorEntry) -> bool:
        """Whether an optimizer's tensor has an element for each of its parameter, so that they are shared out alike."""
        return entry.shape == list(held.shape) and key not in self._scalars


def _scalars(manifest: Manifest) -> frozenset[str]:
    """Return under which names an optimizer keeps one number per parameter.

    Its state of a parameter without dimensions does not tell whether it is the one number, or the one element.
    """
    state = {} if manifest.optimizer is None else manifest.optimizer.state
    shapes = {name: entry.shape for name, entry in manifest.weights.items()}
    found = {
        key
        for name, kept in state.items()
        if shapes.get(name)
        for key, entry in kept.tensors.items()
        if not entry.shape
    }
    return frozenset(found | {STEP})
