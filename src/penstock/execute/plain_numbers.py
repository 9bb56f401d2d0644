"""Plain numbers in what crosses between stages: they travel beside the tensors, since they may change at any message.

Their places and types are agreed on as shapes are. Text, and an integer beyond 64 bits, is part of the agreement.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.execute.tree import Layout, TensorInfo

_CODES: dict[type, str] = {bool: "?", int: "q", float: "d"}
_LIMIT = 2**63


@dataclass(frozen=True, slots=True)
class PlainNumbers:
    """Where a tree has numbers, and how they are written into the bytes of one tensor."""

    places: tuple[int, ...]
    """Indices of leaves."""
    code: str
    """Of `struct`."""

    @classmethod
    def of(cls, layout: Layout) -> "PlainNumbers | None":
        """Return those of a layout; None where it has none."""
        places = tuple(index for index, leaf in enumerate(layout.leaves) if is_number(leaf))
        return cls(places, "<" + "".join(_CODES[type(layout.leaves[place])] for place in places)) if places else None

    @property
    def num_bytes(self) -> int:
        return struct.calcsize(self.code)

    def written(self, leaves: Sequence[Any]) -> Tensor:
        """Return the numbers among a tree's leaves as a tensor of bytes."""
        text = bytearray(struct.pack(self.code, *(leaves[place] for place in self.places)))
        return torch.frombuffer(text, dtype=torch.uint8)

    def read(self, layout: Layout, written: Tensor) -> Layout:
        """Return the layout with these numbers."""
        leaves = list(layout.leaves)
        for place, number in zip(self.places, struct.unpack(self.code, written.cpu().numpy().tobytes()), strict=True):
            leaves[place] = number
        return Layout(layout.spec, tuple(leaves))


def is_number(leaf: object) -> bool:
    """Whether a leaf is a plain number that may change at any message."""
    return type(leaf) in (bool, float) or (type(leaf) is int and -_LIMIT <= leaf < _LIMIT)


def is_alike(layout: Layout, agreed: Layout) -> bool:
    """Whether a tree fits what was agreed on: all but the values of numbers, NaN among them, is equal.

    Of what cannot travel, and so stays on its rank, only the class counts.
    """
    if layout.spec != agreed.spec:
        return False
    return all(_fits(*pair) for pair in zip(layout.leaves, agreed.leaves, strict=True))


def _fits(leaf: object, agreed: object) -> bool:
    if isinstance(agreed, TensorInfo):
        return leaf == agreed
    if type(leaf) is not type(agreed):
        return False
    if type(leaf) not in (int, str):
        return True
    return (is_number(leaf) and is_number(agreed)) or leaf == agreed
