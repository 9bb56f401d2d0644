"""The parameters and buffers of this rank as files have them: their names, the rows of each, and how it is filled."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from penstock.checkpoints.agreement import failing_as
from penstock.checkpoints.content import held_weights, names_in_checkpoint
from penstock.checkpoints.held import Held, alike
from penstock.errors import CheckpointError
from penstock.pipeline import Pipeline


@dataclass(frozen=True, slots=True, eq=False)
class OwnTensors:
    """What one rank reads of the weights."""

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
        pipeline.load_state_dict({name: alike(current[name], tensors[saved]) for name, saved in self.names.items()})


def own_tensors(pipeline: Pipeline) -> OwnTensors:
    """Look at what this rank holds; every rank calls it. Raises: CheckpointError, on every rank."""
    held: dict[str, Held] = {}

    def look() -> dict[str, str]:
        held.update(held_weights(pipeline.state_dict(), pipeline.control.places))
        return dict(pipeline.owner_names)

    everyone = pipeline.control.together(look, failing_as(CheckpointError))
    return OwnTensors(names_in_checkpoint(pipeline, everyone), held)
