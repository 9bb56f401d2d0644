"""What a checkpoint consists of: the tensors of one rank, and which rank saves which.

Several ranks may hold one tensor: the two copies of a stage where a schedule has two routes. They take turns, so that
every rank saves its share. Of tied parameters, the owner's is saved, under the owner's name.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from torch import Tensor
from torch.optim import Optimizer

from penstock.checkpoints.optimizer_state import OptimizerContent, optimizer_content
from penstock.checkpoints.shards import dtype_name
from penstock.errors import MAX_SHOWN, CheckpointError, nearest
from penstock.execute.model_part import ModelPart

WEIGHTS, OPTIMIZER = "weights", "optimizer"
"""The parts of a checkpoint that are files, and how the names of those files begin."""
SEPARATOR = ":"
"""Between a parameter's name and the optimizer's name for what it keeps of it, in files."""
SAME_MODEL = "Make the same model, or name weights of this one"
"""What to do about weights of another model."""


class Described(TypedDict):
    """What a rank tells the others of its content; plain values."""

    weights: dict[str, tuple[str, list[int]]]
    """Type and shape by name."""
    state: dict[str, dict[str, tuple[str, list[int]]]]
    """The same of the optimizer's tensors, by name of a parameter."""
    values: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    optimizer: str
    """The class; empty where there is none."""


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """All that a rank could save: copies of other ranks' tensors, but not those of tied parameters."""

    weights: dict[str, Tensor]
    optimizer: OptimizerContent | None

    @classmethod
    def of(cls, model: ModelPart, optimizer: Optimizer | None) -> "Content":
        """Raises: CheckpointError, where something cannot be saved."""
        weights = {name: value for name, value in model.state_dict().items() if name not in model.copied_names}
        for name, value in weights.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(f"{name!r} is a {type(value).__name__}, which is no tensor; save it in `extra`")
        if optimizer is None:
            return cls(weights, None)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        found = optimizer_content(optimizer, names)
        for name in model.copied_names & found.tensors.keys():
            del found.tensors[name], found.values[name]
        return cls(weights, found)

    def described(self) -> Described:
        """Return what the other ranks must know of it. Raises: CheckpointError for a type that has no place."""
        weights = {name: _description(name, tensor) for name, tensor in self.weights.items()}
        if self.optimizer is None:
            return Described(weights=weights, state={}, values={}, groups=[], optimizer="")
        return Described(
            weights=weights,
            state={
                name: {key: _description(f"{name}: {key}", tensor) for key, tensor in kept.items()}
                for name, kept in self.optimizer.tensors.items()
            },
            values=self.optimizer.values,
            groups=[group.model_dump() for group in self.optimizer.groups],
            optimizer=self.optimizer.name,
        )

    def part(self, owned: frozenset[str]) -> dict[str, dict[str, Tensor]]:
        """Return, per part and name in the file, the tensors of the names that this rank saves."""
        state = {} if self.optimizer is None else self.optimizer.tensors
        return {
            WEIGHTS: {name: tensor for name, tensor in self.weights.items() if name in owned},
            OPTIMIZER: {
                f"{name}{SEPARATOR}{key}": tensor
                for name, kept in state.items()
                if name in owned
                for key, tensor in kept.items()
            },
        }


def owned_names(everyone: Sequence[Described]) -> list[frozenset[str]]:
    """Return, per rank, the names of which it saves all; the same on every rank."""
    holders: dict[str, list[int]] = {}
    for rank, theirs in enumerate(everyone):
        for name in theirs["weights"]:
            holders.setdefault(name, []).append(rank)
    owners = {name: ranks[turn % len(ranks)] for turn, (name, ranks) in enumerate(sorted(holders.items()))}
    return [frozenset(name for name, owner in owners.items() if owner == rank) for rank in range(len(everyone))]


def file_name(part: str, rank: int, num_ranks: int) -> str:
    """Return the name of a rank's file."""
    return f"{part}-{rank + 1:05d}-of-{num_ranks:05d}.safetensors"


def names_in_checkpoint(model: ModelPart, everyone: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the names of this rank's tensors, each with the one under which it is saved.

    `everyone` are the `owner_names` of all ranks: an owner may list its parameter under another name than others know.
    """
    further = {name: owner for theirs in everyone for name, owner in theirs.items()}
    found = {}
    for name in model.state_dict():
        saved = model.owner_names.get(name, name)
        found[name] = further.get(saved, saved) if name in model.owner_names else name
    return found


def require_same_names(where: Path, found: Collection[str], wanted: Collection[str]) -> None:
    """Refuse tensors whose names are not those of the model, of all ranks together. Raises: CheckpointError."""
    if missing := sorted(set(wanted) - set(found)):
        raise CheckpointError(
            f"{where}: is of another model: it has no {_listed(missing)}.{nearest(missing[0], found)} {SAME_MODEL}"
        )
    if strange := sorted(set(found) - set(wanted)):
        raise CheckpointError(f"{where}: is of another model, which also has {_listed(strange)}. {SAME_MODEL}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return f"{', '.join(map(repr, names[:MAX_SHOWN]))}{more}"


def _description(name: str, tensor: Tensor) -> tuple[str, list[int]]:
    return dtype_name(name, tensor), list(tensor.shape)
