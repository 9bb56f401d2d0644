"""Copies of tensors in the memory of the CPU, from which files are written while training goes on.

    every rank   copies what it holds of the tensors that it writes ─► all have memory for it
    replicas     send each other the rows that they lack

The buffers are made once: a save that begins after another one is over writes into the same memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.checkpoints.agreement import failing_as
from penstock.checkpoints.content import Content
from penstock.checkpoints.held import Held
from penstock.checkpoints.row_exchange import exchange_rows
from penstock.errors import NotSaved
from penstock.execute.accelerator import has_queue, synchronize
from penstock.pipeline import Pipeline

Staged = dict[str, dict[str, Tensor]]
"""Whole tensors by part and name in the file."""


@dataclass(slots=True, eq=False)
class Staging:
    """The buffers of one rank."""

    _buffers: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def copy(self, parts: Mapping[str, Mapping[str, Held]]) -> Staged:
        """Return contiguous copies, complete when this returns but for rows that are elsewhere.

        They hold until the next call.
        """
        wanted = {(part, name): held for part, several in parts.items() for name, held in several.items()}
        # A tensor that is not saved any more, or has grown, gives its memory back first.
        self._buffers = {
            key: kept
            for key, kept in self._buffers.items()
            if key in wanted and (kept.shape, kept.dtype) == (wanted[key].shape, wanted[key].local.dtype)
        }
        for key, held in wanted.items():
            local = held.local
            if key not in self._buffers:
                self._buffers[key] = torch.empty(held.shape, dtype=local.dtype, pin_memory=has_queue(local))
            held.place_in(self._buffers[key]).copy_(local, non_blocking=has_queue(local))
        for device in {held.local.device for held in wanted.values()}:
            synchronize(device)
        return {part: {name: self._buffers[part, name] for name in several} for part, several in parts.items()}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._buffers.values())


def stage(staging: Staging, pipeline: Pipeline, content: Content, owned: Sequence[frozenset[str]]) -> Staged:
    """Copy the whole tensors of the names that this rank owns; every rank calls it, with the names of all ranks.

    Raises:
        NotSaved: on every rank, where one has not the memory.
        PeerLost, DeadlineExceeded: a replica does not send its rows.
    """
    control = pipeline.control
    staged: Staged = {}
    own = content.part(owned[control.rank])
    control.together(lambda: staged.update(staging.copy(own)), failing_as(NotSaved))
    places = control.places
    if places.data is not None:
        parts = [content.part(owned[rank]).values() for rank in places.across]
        wanted = [[held for part in of_rank for held in part.values() if held.rows is not None] for of_rank in parts]
        pairs = [(held, staged[part][name]) for part, several in own.items() for name, held in several.items()]
        targets = [whole for held, whole in pairs if held.rows is not None]
        exchange_rows(places.data, wanted, targets, pipeline.device)
    return staged
