"""Copies of tensors in the memory of the CPU, from which files are written while training goes on.

The buffers are made once: a save that begins after another one is over writes into the same memory.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.execute.accelerator import has_queue, synchronize


@dataclass(slots=True, eq=False)
class Staging:
    """The buffers of one rank."""

    _buffers: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def copy(self, parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Return contiguous copies, complete when this returns; they hold until the next call."""
        wanted = {(part, name): tensor for part, tensors in parts.items() for name, tensor in tensors.items()}
        # What is not saved any more, or has grown, gives its memory back first.
        self._buffers = {key: kept for key, kept in self._buffers.items() if key in wanted and _fits(kept, wanted[key])}
        for key, tensor in wanted.items():
            if key not in self._buffers:
                self._buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=has_queue(tensor))
            self._buffers[key].copy_(tensor.detach(), non_blocking=has_queue(tensor))
        for device in {tensor.device for tensor in wanted.values()}:
            synchronize(device)
        return {part: {name: self._buffers[part, name] for name in tensors} for part, tensors in parts.items()}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def _tensors(self) -> Iterator[Tensor]:
        return iter(self._buffers.values())


def _fits(buffer: Tensor, tensor: Tensor) -> bool:
    return buffer.shape == tensor.shape and buffer.dtype == tensor.dtype
