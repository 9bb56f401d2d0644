"""The part of a tensor that a rank holds: all of it, or the rows of its replica where it is sharded.

Files have no shards. This is the only file of the folder that knows of DTensors.
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
class LocalTensor:
    """The part of a tensor that this rank holds."""

    local: Tensor
    """A plain tensor, in the memory of the model or optimizer."""
    shape: tuple[int, ...]
    """The shape of the whole tensor, of which `local` may be some rows."""
    rows: range | None = None
    """The rows of the whole tensor that `local` is; None where `local` is all of it, as on every replica."""

    def place_in(self, full_tensor: Tensor) -> Tensor:
        """Return the view of a whole tensor into which `local` belongs."""
        return full_tensor if self.rows is None else full_tensor[self.rows.start : self.rows.stop]


def local_tensor_of(name: str, tensor: Any, places: Places) -> LocalTensor:
    """Return what this rank holds of a tensor of the model or the optimizer, which messages call `name`.

    Raises:
        CheckpointError: a DTensor that is not shared out over the replicas of the pipeline by its rows.
    """
    if not is_dtensor(tensor):
        return LocalTensor(tensor.detach(), tuple(tensor.shape))
    local, shape, mesh = local_part(tensor), tuple(tensor.shape), tensor.device_mesh
    if mesh.ndim == 1 and mesh.size() == places.num_replicas:
        if is_replicated(tensor):
            return LocalTensor(local, shape)
        rows = Rows(tensor.shape, (), places.num_replicas).of_replica(places.replica)
        if tensor.placements[0].is_shard(0) and tuple(local.shape) == (len(rows), *shape[1:]):
            return LocalTensor(local, shape, rows)
    raise CheckpointError(
        f"{name!r} is a DTensor of shape {shape} with the placements {tuple(tensor.placements)}, of which this rank "
        f"has {tuple(local.shape)}; expected rows over the {count_of(places.num_replicas, 'replica')} of the pipeline, "
        f"as `shard` makes them over the dimension {DATA!r} of its mesh. Save it with torch.distributed.checkpoint"
    )


def distributed_like(reference: Tensor, rows: Tensor) -> Tensor:
    """Return `rows` as a DTensor that is laid out as `reference`, or as they are where that is a plain tensor.

    The dtype is that of `rows`.
    """
    if not is_dtensor(reference):
        return rows
    local = torch.empty_like(local_part(reference), dtype=rows.dtype, requires_grad=False)
    return part_like(reference, local.copy_(rows))
