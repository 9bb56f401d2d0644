"""The part of a tensor that a rank holds: all of it, or the rows of its replica where it is sharded.

Files have no shards. All that checkpoints know of DTensors is here.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CheckpointError, count_of
from penstock.execute.replicas.rows import Rows
from penstock.execute.transport.places import DATA, Places
from penstock.execute.values.tensors import is_dtensor, is_replicated, local_part, part_like


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """The part of a tensor that this rank holds."""

    local: Tensor
    """A plain tensor, in the memory of the model or optimizer."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    rows: range | None = None
    """Which rows of it are here; None: all of it, as on every replica."""

    def place_in(self, whole: Tensor) -> Tensor:
        """Return the part of a whole tensor that is here."""
        return whole if self.rows is None else whole[self.rows.start : self.rows.stop]


def held_of(name: str, tensor: Any, places: Places) -> Held:
    """Return what this rank holds of a tensor.

    Raises:
        CheckpointError: a DTensor that is not shared out over the replicas of the pipeline by its rows.
    """
    if not is_dtensor(tensor):
        return Held(tensor.detach(), tuple(tensor.shape))
    local, shape, mesh = local_part(tensor), tuple(tensor.shape), tensor.device_mesh
    if mesh.ndim == 1 and mesh.size() == places.num_replicas:
        if is_replicated(tensor):
            return Held(local, shape)
        rows = Rows(tensor.shape, (), places.num_replicas).of_replica(places.replica)
        if tensor.placements[0].is_shard(0) and tuple(local.shape) == (len(rows), *shape[1:]):
            return Held(local, shape, rows)
    raise CheckpointError(
        f"{name!r} is a DTensor of shape {shape} with the placements {tuple(tensor.placements)}, of which this rank "
        f"has {tuple(local.shape)}; expected rows over the {count_of(places.num_replicas, 'replica')} of the pipeline, "
        f"as `shard` makes them over the dimension {DATA!r} of its mesh. Save it with torch.distributed.checkpoint"
    )


def alike(like: Tensor, rows: Tensor) -> Tensor:
    """Return a tensor of the kind of another one, of which this rank holds these rows; its type may be another."""
    if not is_dtensor(like):
        return rows
    local = torch.empty_like(local_part(like), dtype=rows.dtype, requires_grad=False)
    return part_like(like, local.copy_(rows))
