"""The values of a batch, each with the dimension along which it is cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PipelineError
from penstock.execute.batch.microbatch import PreSplit, Replicate, Split

Mark = Split | Replicate | None
"""The marker of a value; None for the default."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Along what a batch is cut, in the words of messages."""

    dimension: str
    unit: str
    parts: str
    option: str
    """Which one holds the markers."""


SAMPLES = Axis("batch dimension", "row", "microbatches", "specs")
SEQUENCE = Axis("sequence dimension", "position", "slices", "slice_specs")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value of a batch; `dim` is where it is cut, None where every part gets it whole."""

    place: str
    value: Any
    dim: int | None

    @property
    def length(self) -> int:
        return int(self.value.shape[self.dim])

    def pieces(self, sizes: Sequence[int]) -> Sequence[Any]:
        if isinstance(self.value, PreSplit):
            return self.value.parts
        if self.dim is None:
            return [self.value] * len(sizes)
        # Each piece has a version of its own: a layer may change one in place while another waits for its backward.
        # Pieces of `Tensor.split` share one version, so that autograd would take the other for changed too.
        return torch.unsafe_split_with_sizes(self.value, list(sizes), self.dim)

    def __str__(self) -> str:
        if isinstance(self.value, PreSplit):
            return self.place
        return f"{self.place} (shape {tuple(self.value.shape)}, split on dim {self.dim})"


def leaf_along(axis: Axis, place: str, value: Any, mark: Mark, default_dim: int) -> Leaf:
    """Return a value with the dimension of its marker, or the default one if it has that. Raises: PipelineError."""
    if isinstance(mark, Replicate) or not isinstance(value, (Tensor, PreSplit)):
        return Leaf(place, value, None)
    dim = default_dim if mark is None else mark.dim
    if isinstance(value, PreSplit) or _has_dim(value, dim):
        return Leaf(place, value, dim)
    return Leaf(place, value, None if mark is None else checked_dim(place, value, dim, axis))


def checked_dim(place: str, tensor: Tensor, dim: int, axis: Axis) -> int:
    """Return the dimension of a marker. Raises: PipelineError: the tensor has no such dimension."""
    if not _has_dim(tensor, dim):
        raise PipelineError(
            f"{place} of shape {tuple(tensor.shape)} cannot be split on dim {dim}; expected a dim below "
            f"{tensor.dim()}. Give Split() in {axis.option} another dim, or mark it Replicate()"
        )
    return dim


def _has_dim(tensor: Tensor, dim: int) -> bool:
    return -tensor.dim() <= dim < tensor.dim()
