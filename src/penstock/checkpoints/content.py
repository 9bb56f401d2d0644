"""The content of a checkpoint: the tensors of one rank, and which rank saves which.

Several ranks may hold one tensor: the replicas of a stage, all of it or its rows, and the two copies of a stage where a
schedule has two routes. Each tensor is saved whole by one of them, so that every rank saves its share of the bytes. Of
tied parameters, the owner's is saved, under the owner's name.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from torch import Tensor
from torch.optim import Optimizer

from penstock.checkpoints.agreement import failing_as
from penstock.checkpoints.held import Held, held_of
from penstock.checkpoints.optimizer_state import NO_OPTIMIZER, OptimizerContent, optimizer_content
from penstock.checkpoints.shards import ITEM_BYTES, dtype_name
from penstock.errors import CheckpointError, NotSaved, listed, nearest
from penstock.execute.model_part import ModelPart
from penstock.execute.transport.places import Places
from penstock.pipeline import Pipeline

WEIGHTS, OPTIMIZER = "weights", "optimizer"
"""The parts of a checkpoint that are files, and how the names of those files begin."""
SEPARATOR = ":"
"""Between a parameter's name and the optimizer's name for what it keeps of it, in files."""
SAME_MODEL = "Make the same model, or name weights of this one"
"""The fix for weights of another model."""


Kind = tuple[str, list[int]]
"""The type of a tensor, as safetensors files call it, and its shape."""


class Described(TypedDict):
    """The content of a rank as it describes it to the others; plain values."""

    weights: dict[str, Kind]
    """Type and shape by name."""
    state: dict[str, dict[str, Kind]]
    """The same of the optimizer's tensors, by name of a parameter."""
    by_rows: list[str]
    """Names in files of the tensors of which each replica holds some rows."""
    values: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    optimizer: str
    """The class; empty where there is none."""


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """All that a rank could save: copies of other ranks' tensors, but not those of tied parameters."""

    weights: dict[str, Held]
    state: dict[str, dict[str, Held]]
    """The optimizer's tensors, by name of a parameter."""
    optimizer: OptimizerContent

    @classmethod
    def of(cls, model: Pipeline, optimizer: Optimizer | None) -> "Content":
        """Raises: CheckpointError, where something cannot be saved."""
        places = model.control.places
        weights = held_weights(
            {name: value for name, value in model.state_dict().items() if name not in model.copied_names}, places
        )
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        found = NO_OPTIMIZER if optimizer is None else optimizer_content(optimizer, names)
        for name in model.copied_names & found.tensors.keys():
            del found.tensors[name], found.values[name]
        state = {
            name: {key: held_of(f"{name}: {key}", tensor, places) for key, tensor in kept.items()}
            for name, kept in found.tensors.items()
        }
        return cls(weights, state, found)

    def described(self) -> Described:
        """Return what the other ranks must know of it. Raises: CheckpointError for a type that has no place."""
        weights = {name: _description(name, held) for name, held in self.weights.items()}
        state = {
            name: {key: _description(f"{name}: {key}", held) for key, held in kept.items()}
            for name, kept in self.state.items()
        }
        parts = self.part(self.weights.keys()).values()
        everything = [pair for part in parts for pair in part.items()]
        return Described(
            weights=weights,
            state=state,
            by_rows=[name for name, held in everything if held.rows is not None],
            values=self.optimizer.values,
            groups=[group.model_dump() for group in self.optimizer.groups],
            optimizer=self.optimizer.name,
        )

    def part(self, owned: Collection[str]) -> dict[str, dict[str, Held]]:
        """Return, per part and name in the file, what this rank holds of the tensors of some names, in their order."""
        return {
            WEIGHTS: {name: self.weights[name] for name in sorted(owned)},
            OPTIMIZER: {
                f"{name}{SEPARATOR}{key}": held
                for name in sorted(owned)
                for key, held in sorted(self.state.get(name, {}).items())
            },
        }


def held_weights(state: Mapping[str, Any], places: Places) -> dict[str, Held]:
    """Return what this rank holds of the tensors of a state dict. Raises: CheckpointError."""
    for name, value in state.items():
        if not isinstance(value, Tensor):
            problem = f"{name!r} is a {type(value).__name__}, which is no tensor; save it in `extra`"
            raise CheckpointError(problem)
    return {name: held_of(name, value, places) for name, value in state.items()}


def gather_content(
    pipeline: Pipeline, optimizer: Optimizer | None, further: Callable[[], Any] = lambda: None
) -> tuple[Content, list[Described], list[Any]]:
    """Return what this rank has, and what each rank says of its own and of `further`, which is called first.

    Every rank calls it. Raises: NotSaved, on every rank.
    """
    content: list[Content] = []

    def describe() -> tuple[Any, Described]:
        own = further()
        content.append(Content.of(pipeline, optimizer))
        return own, content[0].described()

    everyone = pipeline.control.together(describe, failing_as(NotSaved))
    described = [theirs for _, theirs in everyone]
    require_equal_replicas(described, pipeline.control.places)
    return content[0], described, [own for own, _ in everyone]


def require_equal_replicas(everyone: Sequence[Described], places: Places) -> None:
    """Refuse replicas of a stage that hold other tensors than each other. Raises: NotSaved, alike on all ranks."""
    for index, theirs in enumerate(everyone):
        first = index % places.pipeline.num_ranks
        for key, what in _HELD_ALIKE.items():
            if theirs[key] != everyone[first][key]:  # type: ignore[literal-required]
                raise NotSaved(
                    f"{places.names[index]} has {what} than {places.names[first]}, which holds the same stages; let "
                    "all replicas make their layers and optimizers alike"
                )


_HELD_ALIKE = {
    "weights": "other parameters or buffers",
    "optimizer": "another optimizer",
    "state": "another state of the optimizer",
    "by_rows": "other shards",
}


def owned_names(everyone: Sequence[Described]) -> list[frozenset[str]]:
    """Return, per rank, the names of which it saves all: shares of about equal bytes, the same on every rank."""
    holders: dict[str, list[int]] = {}
    for rank, theirs in enumerate(everyone):
        for name in theirs["weights"]:
            holders.setdefault(name, []).append(rank)
    num_bytes = {name: _saved_bytes(everyone[ranks[0]], name) for name, ranks in holders.items()}
    shares = [0] * len(everyone)
    owned: list[set[str]] = [set() for _ in everyone]
    # Small tensors even out what large ones leave uneven.
    for name in sorted(holders, key=lambda name: (-num_bytes[name], name)):
        owner = min(holders[name], key=lambda rank: (shares[rank], rank))
        shares[owner] += num_bytes[name]
        owned[owner].add(name)
    return [frozenset(names) for names in owned]


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
            f"{where}: is of another model: it has no {listed(missing, quoted=repr)}."
            f"{nearest(missing[0], found)} {SAME_MODEL}"
        )
    if strange := sorted(set(found) - set(wanted)):
        raise CheckpointError(
            f"{where}: is of another model, which also has {listed(strange, quoted=repr)}. {SAME_MODEL}"
        )


def _description(name: str, held: Held) -> Kind:
    return dtype_name(name, held.local), list(held.shape)


def _saved_bytes(described: Described, name: str) -> int:
    """Return the bytes of a parameter or buffer, and of what the optimizer keeps of it."""
    kept = described["state"].get(name, {})
    saved: Iterable[Kind] = [described["weights"][name], *kept.values()]
    return sum(math.prod(shape) * ITEM_BYTES[dtype] for dtype, shape in saved)
