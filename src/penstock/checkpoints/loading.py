"""Loading a checkpoint into any number of ranks and replicas, schedule and split: a rank reads what it holds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from penstock.checkpoints.agreement import failing_as, run_together
from penstock.checkpoints.content import (
    SAME_MODEL,
    SEPARATOR,
    local_weights,
    names_in_checkpoint,
    require_same_names,
)
from penstock.checkpoints.local_tensors import LocalTensor, distributed_like
from penstock.checkpoints.manifest import Manifest, TensorEntry
from penstock.checkpoints.module_settings import require_settings
from penstock.checkpoints.optimizer_state import STEP, load_optimizer, require_loadable
from penstock.checkpoints.random_state import random_state_restorer
from penstock.checkpoints.rebuilt import require_rebuilt
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
    checkpoint = find_newest(control, folder)
    weights = local_weights_of(pipeline)
    reader = _Reader(checkpoint, pipeline, optimizer, weights)
    saved_names_by_rank = control.together(lambda: list(weights.saved_names.values()), fails_as)
    saved_names = {name for names in saved_names_by_rank for name in names}
    require_rebuilt(pipeline, checkpoint.manifest.rebuilt, checkpoint.path)
    require_settings(pipeline, checkpoint.manifest.settings, checkpoint.path)
    control.together(lambda: reader.require_same_model(saved_names), fails_as)
    tensors = run_together(control, reader.read, num_bytes=checkpoint.manifest.num_bytes, path=checkpoint.path)
    reader.load(tensors)
    return checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class LocalWeights:
    """The parameters and buffers of one rank, as the targets of a load."""

    saved_names: Mapping[str, str]
    """Name of every tensor in files, by this rank's name for it; a copy of a tied parameter has its owner's."""
    tensors: Mapping[str, LocalTensor]
    """The tensors by this rank's names."""

    def rows(self) -> dict[str, range]:
        """Return the rows that this rank reads of a tensor, by name in files; whole tensors are left out."""
        rows = {saved_name: self.tensors[name].rows for name, saved_name in self.saved_names.items()}
        return {saved_name: tensor_rows for saved_name, tensor_rows in rows.items() if tensor_rows is not None}

    def load(self, pipeline: Pipeline, tensors_by_saved_name: Mapping[str, Tensor]) -> None:
        """Copy tensors of files, of which this rank has read its rows, into the model. Every rank calls it.

        Raises: PenstockError.
        """
        state = pipeline.state_dict()
        for name, saved_name in self.saved_names.items():
            state[name] = distributed_like(state[name], tensors_by_saved_name[saved_name])
        pipeline.load_state_dict(state)


def local_weights_of(pipeline: Pipeline, *, in_checkpoint: bool = True) -> LocalWeights:
    """Return the parameters and buffers of this rank; every rank calls it.

    What layers make again is in no checkpoint, but in files of weights. Raises: CheckpointError, on every rank.
    """
    tensors: dict[str, LocalTensor] = {}

    def look_at_state() -> dict[str, str]:
        skipped_names = pipeline.rebuilt_names if in_checkpoint else ()
        loaded = {name: value for name, value in pipeline.state_dict().items() if name not in skipped_names}
        tensors.update(local_weights(loaded, pipeline.control.places))
        return dict(pipeline.owner_names)

    owner_names_by_rank = pipeline.control.together(look_at_state, failing_as(CheckpointError))
    saved_names = names_in_checkpoint(pipeline, owner_names_by_rank)
    return LocalWeights({name: saved_name for name, saved_name in saved_names.items() if name in tensors}, tensors)


class _Reader:
    """Compares a checkpoint with the model and optimizer of one rank, then reads and loads this rank's part of it."""

    def __init__(
        self, checkpoint: FoundCheckpoint, pipeline: Pipeline, optimizer: Optimizer | None, weights: LocalWeights
    ) -> None:
        self._path = checkpoint.path
        self._manifest: Manifest = checkpoint.manifest
        self._pipeline = pipeline
        self._optimizer = optimizer
        self._weights = weights
        self._restore_random: Callable[[], None] | None = None
        self._parameters = {
            weights.saved_names[name]: (parameter, weights.tensors[name])
            for name, parameter in pipeline.named_parameters()
            if name in weights.tensors
        }
        """The parameters of this rank and what it holds of them, by name in the checkpoint."""
        saved_state = {} if optimizer is None or self._manifest.optimizer is None else self._manifest.optimizer.state
        self._state_entries = {name: saved_state[name].tensors for name in self._parameters if name in saved_state}
        """The saved tensors of this rank's optimizer, by parameter, then by the optimizer's name."""
        self._scalars = _scalars(checkpoint.manifest)
        self._names = {id(parameter): name for name, (parameter, _) in self._parameters.items()}
        """Names in the checkpoint, by id of a parameter."""

    def require_same_model(self, saved_names: set[str]) -> None:
        """Refuse a checkpoint of another model or optimizer; nothing is changed yet.

        `saved_names` are those that the models of all ranks have in files. Raises: CheckpointError, which names what
        differs.
        """
        entries = self._manifest.weights
        require_same_names(self._path, entries, saved_names)
        for name, tensor in self._weights.tensors.items():
            saved_name = self._weights.saved_names[name]
            entry, dtype, shape = entries[saved_name], dtype_name(saved_name, tensor.local), list(tensor.shape)
            if (dtype, shape) != (entry.dtype, entry.shape):
                raise CheckpointError(
                    f"{self._path}: is of another model: {saved_name!r} is {entry.dtype} {tuple(entry.shape)} in it, "
                    f"but {dtype} {tuple(shape)} in the model. {SAME_MODEL}"
                )
        if self._optimizer is not None:
            require_loadable(self._optimizer, self._manifest.optimizer, self._names, self._path)
        self._prepare_random_state()

    def _prepare_random_state(self) -> None:
        """Read where this rank's generators were, if as many ranks and replicas saved it. Raises: CheckpointError."""
        control = self._pipeline.control
        saved_layout = len(self._manifest.random), self._manifest.replicas
        if saved_layout != (control.num_ranks, control.places.num_replicas):
            return
        try:
            state = self._manifest.random[control.rank]
            self._restore_random = random_state_restorer(state, self._pipeline.device)
        except CheckpointError as error:
            raise CheckpointError(f"{self._path}: {error}") from error

    def read(self) -> dict[str, Tensor]:
        """Return this rank's tensors, or its rows of them, by their names in files. Raises: CheckpointError."""
        entries = {name: self._manifest.weights[name] for name in self._weights.saved_names.values()}
        rows = self._weights.rows()
        for name, state_entries in self._state_entries.items():
            _, parameter_tensor = self._parameters[name]
            for key, entry in state_entries.items():
                entries[f"{name}{SEPARATOR}{key}"] = entry
                if parameter_tensor.rows is not None and self._is_shared_out_as(parameter_tensor, key, entry):
                    rows[f"{name}{SEPARATOR}{key}"] = parameter_tensor.rows
        return read_files({name: self._path / entry.file for name, entry in entries.items()}, rows)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Change the model, the optimizer and the random numbers. Every rank calls it. Raises: PenstockError."""
        pipeline, manifest = self._pipeline, self._manifest
        self._weights.load(pipeline, tensors)
        pipeline.step_number = manifest.pipeline_steps
        # Also on a rank without an optimizer, such as one without trained parameters: the others wait for it.
        pipeline.control.together(lambda: self._load_optimizer(tensors), failing_as(CheckpointError))
        if self._restore_random is not None:
            self._restore_random()

    def _load_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        """Load this rank's part of the optimizer's state, if there is an optimizer. Raises: CheckpointError."""
        optimizer_entry = self._manifest.optimizer
        if self._optimizer is not None and optimizer_entry is not None:
            load_optimizer(self._optimizer, optimizer_entry, self._state(tensors), self._names)

    def _state(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer's tensors, by name of a parameter, as DTensors where their parameter is one.

        `tensors` are those that were read, by name in files.
        """
        state: dict[str, dict[str, Tensor]] = {}
        for name, state_entries in self._state_entries.items():
            parameter, parameter_tensor = self._parameters[name]
            state[name] = {key: tensors[f"{name}{SEPARATOR}{key}"] for key in state_entries}
            for key, entry in state_entries.items():
                if self._is_shared_out_as(parameter_tensor, key, entry):
                    state[name][key] = distributed_like(parameter, state[name][key])
        return state

    def _is_shared_out_as(self, parameter_tensor: LocalTensor, key: str, entry: TensorEntry) -> bool:
        """Whether an optimizer's tensor has an element for each of its parameter, and thus the same rows here."""
        return entry.shape == list(parameter_tensor.shape) and key not in self._scalars


def _scalars(manifest: Manifest) -> frozenset[str]:
    """Return the names under which an optimizer keeps one number per parameter, such as its steps.

    Parameters without dimensions are left out: a tensor of theirs without dimensions may as well be their one element.
    """
    state = {} if manifest.optimizer is None else manifest.optimizer.state
    shapes = {name: entry.shape for name, entry in manifest.weights.items()}
    scalar_keys = {
        key
        for name, parameter_state in state.items()
        if shapes.get(name)
        for key, entry in parameter_state.tensors.items()
        if not entry.shape
    }
    return frozenset(scalar_keys | {STEP})
