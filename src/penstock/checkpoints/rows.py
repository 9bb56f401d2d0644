"""What a replica holds of a tensor: all of it, or some rows where the replicas share it out. Files know no rows.

    replica    0         1         2
    rows       0, 1, 2   3, 4, 5   6           of 7: ceil(7 / 3) each, the rest to the last ones, as torch.chunk deals

All that knows of DTensors is here. Their methods tell them, since to import torch.distributed.tensor takes half a
second, which a model without them need not pay.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CheckpointError, count_of
from penstock.execute.transport.places import DATA, Places
from penstock.execute.values.tensors import is_dtensor


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What this rank holds of a tensor."""

    local: Tensor
    """A plain tensor, in the memory of the model or optimizer."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    rows: range | None = None
    """Which rows of it are here; None: all of it, as on every replica."""
    is_dtensor: bool = False

    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * self.local.itemsize

    def place_in(self, whole: Tensor) -> Tensor:
        """Return the part of a whole tensor that is here."""
        return whole if self.rows is None else whole[self.rows.start : self.rows.stop]


def rows_of(num_rows: int, replica: int, num_replicas: int) -> range:
    """Return the rows of a tensor that a replica holds; the last ones may hold fewer, or none."""
    most = -(-num_rows // num_replicas)
    return range(min(replica * most, num_rows), min((replica + 1) * most, num_rows))


def held_of(name: str, tensor: Tensor, places: Places) -> Held:
    """Return what this rank holds of a tensor.

    Raises:
        CheckpointError: a DTensor that is not shared out over the replicas of the pipeline by its rows.
    """
    if not is_dtensor(tensor):
        return Held(tensor.detach(), tuple(tensor.shape))
    local, shape = _local(tensor), tuple(tensor.shape)
    if _placement(tensor, places.num_replicas) == "replicated":
        return Held(local, shape, is_dtensor=True)
    if _placement(tensor, places.num_replicas) == "rows":
        rows = rows_of(shape[0], places.replica, places.num_replicas)
        if tuple(local.shape) == (len(rows), *shape[1:]):
            return Held(local, shape, rows, is_dtensor=True)
    raise CheckpointError(
        f"{name!r} is a DTensor of shape {shape} with the placements {_placements(tensor)}, of which this rank has "
        f"{tuple(local.shape)}; expected rows over the {count_of(places.num_replicas, 'replica')} of the pipeline, as "
        f"`shard` makes them over the dimension {DATA!r} of its mesh. Save it with torch.distributed.checkpoint"
    )


def alike(like: Tensor, local: Tensor) -> Tensor:
    """Return a tensor of the kind of another one, of which this rank holds `local`; its type may be another."""
    if not is_dtensor(like):
        return local
    kind: Any = like
    made: Tensor = type(kind).from_local(
        local.to(_local(like).device),
        kind.device_mesh,
        kind.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return made


def _placement(tensor: Any, num_replicas: int) -> str:
    """Return how a DTensor lies over the replicas; empty for another way, or over other ranks."""
    mesh = tensor.device_mesh
    if mesh.ndim != 1 or mesh.size() != num_replicas:
        return ""
    (placement,) = tensor.placements
    if placement.is_replicate():
        return "replicated"
    return "rows" if placement.is_shard(0) else ""


def _placements(tensor: Any) -> str:
    return str(tuple(tensor.placements))


def _local(tensor: Any) -> Tensor:
    with torch.no_grad():
        local: Tensor = tensor.detach().to_local()
    return local
