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
from penstock.checkpoints.local_tensors import LocalTensor, local_tensor_of
from penstock.checkpoints.optimizer_state import NO_OPTIMIZER, OptimizerContent, optimizer_content
from penstock.checkpoints.shards import ITEM_BYTES, dtype_name
from penstock.errors import CheckpointError, NotSaved, listed, nearest
from penstock.execute.model_part import ModelPart
from penstock.execute.transport.places import Places
from penstock.pipeline import Pipeline

WEIGHTS, OPTIMIZER = "weights", "optimizer"
"""The parts of a checkpoint that are files, and how the names of those files begin."""
SEPARATOR = ":"
"""In files, the text between a parameter's name and the optimizer's name for a tensor that it keeps of it."""
SAME_MODEL = "Make the same model, or name weights of this one"
"""The fix for weights of another model."""


DtypeAndShape = tuple[str, list[int]]
"""The dtype of a tensor, as safetensors files call it, and its shape, which is that of the whole tensor."""


class RankDescription(TypedDict):
    """The content of a rank as it describes it to the others; plain values."""

    weights: dict[str, DtypeAndShape]
    """The parameters and buffers by name."""
    state: dict[str, dict[str, DtypeAndShape]]
    """The optimizer's tensors, by name of a parameter, then by the optimizer's name."""
    by_rows: list[str]
    """Names in files of the tensors of which each replica holds some rows."""
    values: dict[str, dict[str, Any]]
    """The optimizer's values that are no tensors, by name of a parameter."""
    groups: list[dict[str, Any]]
    """The fields of a `GroupEntry` for each group of the optimizer."""
    optimizer: str
    """The class of the optimizer; empty where there is none."""


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """All that a rank could save, also where other ranks hold the same; of tied parameters, only the owner's."""

    weights: dict[str, LocalTensor]
    """The parameters and buffers by name."""
    state: dict[str, dict[str, LocalTensor]]
    """The optimizer's tensors, by name of a parameter, then by the optimizer's name."""
    optimizer: OptimizerContent

    @classmethod
    def of(cls, model: Pipeline, optimizer: Optimizer | None, *, skip: Collection[str] = ()) -> "Content":
        """Return what this rank could save of a model, but for the parameters and buffers of the names in `skip`.

        Raises: CheckpointError, where something cannot be saved.
        """
        places = model.control.places
        skipped = {*model.copied_names, *skip}
        weights = local_weights(
            {name: value for name, value in model.state_dict().items() if name not in skipped}, places
        )
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        optimizer_state = NO_OPTIMIZER if optimizer is None else optimizer_content(optimizer, names)
        for name in model.copied_names & optimizer_state.tensors.keys():
            del optimizer_state.tensors[name], optimizer_state.values[name]
        state = {
            name: {key: local_tensor_of(f"{name}: {key}", tensor, places) for key, tensor in tensors.items()}
            for name, tensors in optimizer_state.tensors.items()
        }
        return cls(weights, state, optimizer_state)

    def description(self) -> RankDescription:
        """Return the content as other ranks need it. Raises: CheckpointError for a dtype that no file can hold."""
        weights = {name: _description(name, tensor) for name, tensor in self.weights.items()}
        state = {
            name: {key: _description(f"{name}: {key}", tensor) for key, tensor in tensors.items()}
            for name, tensors in self.state.items()
        }
        tensors_by_part = self.part(self.weights.keys()).values()
        file_tensors = [pair for part in tensors_by_part for pair in part.items()]
        return RankDescription(
            weights=weights,
            state=state,
            by_rows=[name for name, tensor in file_tensors if tensor.rows is not None],
            values=self.optimizer.values,
            groups=[group.model_dump() for group in self.optimizer.groups],
            optimizer=self.optimizer.name,
        )

    def part(self, names: Collection[str]) -> dict[str, dict[str, LocalTensor]]:
        """Return this rank's tensors of the parameters and buffers of these names, by part and by name in the file.

        They are sorted by name, so that ranks that hold the same list them in the same order.
        """
        return {
            WEIGHTS: {name: self.weights[name] for name in sorted(names)},
            OPTIMIZER: {
                f"{name}{SEPARATOR}{key}": tensor
                for name in sorted(names)
                for key, tensor in sorted(self.state.get(name, {}).items())
            },
        }


def local_weights(state: Mapping[str, Any], places: Places) -> dict[str, LocalTensor]:
    """Return what this rank holds of the tensors of a state dict. Raises: CheckpointError."""
    for name, value in state.items():
        if not isinstance(value, Tensor):
            problem = f"{name!r} is a {type(value).__name__}, which is no tensor; save it in `extra`"
            raise CheckpointError(problem)
    return {name: local_tensor_of(name, value, places) for name, value in state.items()}


def gather_content(
    pipeline: Pipeline,
    optimizer: Optimizer | None,
    further_facts: Callable[[], Any] = lambda: None,
    *,
    skip: Collection[str] = (),
) -> tuple[Content, list[RankDescription], list[Any]]:
    """Return this rank's content, the description of each rank's, and what `further_facts` returned on each rank.

    Every rank calls it; `further_facts` is called first. The content leaves out the names in `skip`, which are this
    rank's own. Raises: NotSaved, on every rank.
    """
    local_content: list[Content] = []

    def describe_rank() -> tuple[Any, RankDescription]:
        fact = further_facts()
        content = Content.of(pipeline, optimizer, skip=skip)
        local_content.append(content)
        return fact, content.description()

    replies = pipeline.control.together(describe_rank, failing_as(NotSaved))
    descriptions = [description for _, description in replies]
    require_equal_replicas(descriptions, pipeline.control.places)
    return local_content[0], descriptions, [fact for fact, _ in replies]


def require_equal_replicas(descriptions: Sequence[RankDescription], places: Places) -> None:
    """Refuse replicas of a stage whose contents differ. Raises: NotSaved, alike on all ranks."""
    for rank, description in enumerate(descriptions):
        first_replica_rank = rank % places.pipeline.num_ranks
        for field, difference in _EQUAL_ON_REPLICAS.items():
            if description[field] != descriptions[first_replica_rank][field]:  # type: ignore[literal-required]
                raise NotSaved(
                    f"{places.names[rank]} has {difference} than {places.names[first_replica_rank]}, which holds the "
                    "same stages; let all replicas make their layers and optimizers alike"
                )


_EQUAL_ON_REPLICAS = {
    "weights": "other parameters or buffers",
    "optimizer": "another optimizer",
    "state": "another state of the optimizer",
    "by_rows": "other shards",
}
"""The fields of a RankDescription that replicas of a stage have in common, with what to say where they differ."""


def owned_names(descriptions: Sequence[RankDescription]) -> list[frozenset[str]]:
    """Return, per rank, the names of the tensors that it saves, with the optimizer's tensors of these parameters.

    Each name goes to one of the ranks that hold it, in shares of about equal bytes; every rank gets the same result.
    """
    holders: dict[str, list[int]] = {}
    for rank, description in enumerate(descriptions):
        for name in description["weights"]:
            holders.setdefault(name, []).append(rank)
    num_bytes = {name: _saved_bytes(descriptions[ranks[0]], name) for name, ranks in holders.items()}
    shares = [0] * len(descriptions)
    names_by_rank: list[set[str]] = [set() for _ in descriptions]
    # The largest come first, each to the holder with the fewest bytes so far: small ones then even out the shares.
    for name in sorted(holders, key=lambda name: (-num_bytes[name], name)):
        owner = min(holders[name], key=lambda rank: (shares[rank], rank))
        shares[owner] += num_bytes[name]
        names_by_rank[owner].add(name)
    return [frozenset(names) for names in names_by_rank]


def file_name(part: str, rank: int, num_ranks: int) -> str:
    """Return the name of a rank's file."""
    return f"{part}-{rank + 1:05d}-of-{num_ranks:05d}.safetensors"


def names_in_checkpoint(model: ModelPart, owner_names_by_rank: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return, by name of a tensor of this rank, the name under which files have it.

    `owner_names_by_rank` has the `owner_names` of all ranks. They are looked up twice: the name by which this rank
    knows the owner's parameter may itself be a copy's, which the owner saves under another one.
    """
    owners = {name: owner for owner_names in owner_names_by_rank for name, owner in owner_names.items()}
    saved_names = {}
    for name in model.state_dict():
        owner = model.owner_names.get(name, name)
        saved_names[name] = owners.get(owner, owner) if name in model.owner_names else name
    return saved_names


def require_same_names(source: Path, saved_names: Collection[str], model_names: Collection[str]) -> None:
    """Refuse tensors whose names are not those of the model, of all ranks together. Raises: CheckpointError."""
    if missing := sorted(set(model_names) - set(saved_names)):
        raise CheckpointError(
            f"{source}: is of another model: it has no {listed(missing, quoted=repr)}."
            f"{nearest(missing[0], saved_names)} {SAME_MODEL}"
        )
    if surplus := sorted(set(saved_names) - set(model_names)):
        raise CheckpointError(
            f"{source}: is of another model, which also has {listed(surplus, quoted=repr)}. {SAME_MODEL}"
        )


def _description(name: str, tensor: LocalTensor) -> DtypeAndShape:
    return dtype_name(name, tensor.local), list(tensor.shape)


def _saved_bytes(description: RankDescription, name: str) -> int:
    """Return the bytes of a parameter or buffer and of the optimizer's tensors of it."""
    optimizer_tensors = description["state"].get(name, {})
    tensor_types: Iterable[DtypeAndShape] = [description["weights"][name], *optimizer_tensors.values()]
    return sum(math.prod(shape) * ITEM_BYTES[dtype] for dtype, shape in tensor_types)
