"""Copies of tensors in the memory of the CPU, from which files are written while training goes on.

every rank   copies what it holds of the tensors that it writes ─► all have memory for it
replicas     send each other the rows that they lack
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.checkpoints.agreement import failing_as
from penstock.checkpoints.content import Content
from penstock.checkpoints.local_tensors import LocalTensor
from penstock.checkpoints.row_exchange import exchange_rows
from penstock.errors import NotSaved
from penstock.execute.accelerator import is_queued, synchronize
from penstock.pipeline import Pipeline

Staged = dict[str, dict[str, Tensor]]
"""Whole tensors by part and name in the file."""


@dataclass(slots=True, eq=False)
class Staging:
    """The buffers of one rank, which its saves use again and again."""

    _buffers: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    """A buffer for a whole tensor, by part and name in the file."""

    def copy(self, parts: Mapping[str, Mapping[str, LocalTensor]]) -> Staged:
        """Return contiguous copies: this rank's rows are there when this returns, those of others are not yet.

        They are overwritten by the next call.
        """
        tensors_by_key = {(part, name): tensor for part, tensors in parts.items() for name, tensor in tensors.items()}
        layouts = {key: (tensor.shape, tensor.local.dtype) for key, tensor in tensors_by_key.items()}
        # Buffers of tensors that are not saved any more, or have changed, are dropped before new ones are made.
        self._buffers = {
            key: buffer
            for key, buffer in self._buffers.items()
            if layouts.get(key) == (tuple(buffer.shape), buffer.dtype)
        }
        for key, tensor in tensors_by_key.items():
            local, has_queue = tensor.local, is_queued(tensor.local.device)
            if key not in self._buffers:
                self._buffers[key] = torch.empty(tensor.shape, dtype=local.dtype, pin_memory=has_queue)
            tensor.place_in(self._buffers[key]).copy_(local, non_blocking=has_queue)
        for device in {tensor.local.device for tensor in tensors_by_key.values()}:
            synchronize(device)
        return {part: {name: self._buffers[part, name] for name in tensors} for part, tensors in parts.items()}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._buffers.values())


def stage(staging: Staging, pipeline: Pipeline, content: Content, names_by_rank: Sequence[frozenset[str]]) -> Staged:
    """Return copies of the whole tensors that this rank saves; `names_by_rank` has the names that each rank saves.

    Every rank calls it.

    Raises:
        NotSaved: on every rank, where one has not the memory.
        PeerLost, DeadlineExceeded: a replica does not send its rows.
    """
    control = pipeline.control
    staged: Staged = {}
    local_parts = content.part(names_by_rank[control.rank])
    control.together(lambda: staged.update(staging.copy(local_parts)), failing_as(NotSaved))
    places = control.places
    if places.data is not None:
        targets = [staged[part][name] for part, name in _sharded_tensors(local_parts)]
        tensors_by_replica = [
            list(_sharded_tensors(content.part(names_by_rank[rank])).values()) for rank in places.across
        ]
        exchange_rows(places.data, tensors_by_replica, targets, pipeline.device)
    return staged


def _sharded_tensors(parts: Mapping[str, Mapping[str, LocalTensor]]) -> dict[tuple[str, str], LocalTensor]:
    """Return the tensors of which each replica holds some rows, by part and name in the file."""
    tensors_by_key = {(part, name): tensor for part, tensors in parts.items() for name, tensor in tensors.items()}
    return {key: tensor for key, tensor in tensors_by_key.items() if tensor.rows is not None}
