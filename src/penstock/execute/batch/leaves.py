"""The values of a batch, each with the dimension along which it is cut."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PipelineError
from penstock.execute.batch.microbatch import PreSplit, Replicate, Split
from penstock.execute.values.block_masks import cut_mask, is_block_mask, rows_of_mask

Mark = Split | Replicate | None
"""The marker of a value; None for the default."""


@dataclass(frozen=True, slots=True)
class Axis:
    """The dimension along which a batch is cut, in the words of messages."""

    dimension: str
    unit: str
    parts: str
    option: str
    """Name of the option that holds the markers."""


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
        # By `size`, since some nested tensors have no shape.
        return rows_of_mask(self.value) if is_block_mask(self.value) else int(self.value.size(self.dim))

    def pieces(self, sizes: Sequence[int]) -> Sequence[Any]:
        if isinstance(self.value, PreSplit):
            return self.value.parts
        if self.dim is None:
            return [self.value] * len(sizes)
        try:
            if is_block_mask(self.value):
                return cut_mask(self.value, sizes)
            return _pieces_of(self.value, sizes, self.dim)
        except RuntimeError as error:  # a sparse or nested tensor, a mask of a special order
            reason = str(error).partition(". ")[0]  # torch goes on to list its backends
            raise PipelineError(
                f"{self.place} cannot be cut by torch ({reason}). Pass ps.PreSplit([...]) of one for each microbatch, "
                "or a dense tensor"
            ) from error

    def __str__(self) -> str:
        if isinstance(self.value, PreSplit):
            return self.place
        if is_block_mask(self.value):
            return f"{self.place} (a BlockMask)"
        return f"{self.place} (shape {tuple(self.value.shape)}, split on dim {self.dim})"


def leaf_along(axis: Axis, place: str, value: Any, mark: Mark, default_dim: int) -> Leaf:
    """Return a value with the dimension of its marker, or the default one if it has that. Raises: PipelineError."""
    is_mask = is_block_mask(value)
    if is_mask and axis is SEQUENCE and not isinstance(mark, Replicate):
        raise PipelineError(
            f"{place} is a BlockMask, which cannot be cut along the sequence. Make the mask of a slice in the layer, "
            f"or mark it Replicate() in {axis.option} if the layer takes from the whole what its slice needs"
        )
    if isinstance(mark, Replicate) or not (is_mask or isinstance(value, (Tensor, PreSplit))):
        return Leaf(place, value, None)
    if is_mask:
        return Leaf(place, value, 0 if rows_of_mask(value) > 1 else None)  # that of a single row holds for any row
    dim = default_dim if mark is None else mark.dim
    if isinstance(value, PreSplit) or _has_dim(value, dim):
        return Leaf(place, value, dim)
    return Leaf(place, value, None if mark is None else checked_dim(place, value, dim, axis))


def marking(place: str) -> str:
    """Return the option that marks the value at a place: `specs=ps.BatchSpec(kwargs={'images': ps.Replicate()})`."""
    mark = "ps.Replicate()"
    for key, attribute in reversed(re.findall(r"\[([^\]]*)\]|\.(\w+)", place)):
        mark = f"{{{key or repr(attribute)}: {mark}}}"
    root = re.split(r"\W", place, maxsplit=1)[0]
    return f"specs=ps.BatchSpec({root}={mark})"


def checked_dim(place: str, tensor: Tensor, dim: int, axis: Axis) -> int:
    """Return the dimension of a marker. Raises: PipelineError: the tensor has no such dimension."""
    if not _has_dim(tensor, dim):
        raise PipelineError(
            f"{place} of shape {tuple(tensor.shape)} cannot be split on dim {dim}; expected a dim below "
            f"{tensor.dim()}. Give Split() in {axis.option} another dim, or mark it Replicate()"
        )
    return dim


def _pieces_of(tensor: Tensor, sizes: Sequence[int], dim: int) -> Sequence[Tensor]:
    # Each piece has a version of its own: a layer may change one in place while another waits for its backward.
    # Pieces of `Tensor.split` share one version, so that autograd would take the other for changed too.
    if not tensor.requires_grad:
        return torch.unsafe_split_with_sizes(tensor, list(sizes), dim)
    # Each has a node of its own, too: the backward of one piece would call the hooks on all pieces of one with None.
    total = sum(sizes)
    splits = [(end - size, size, total - end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    return [torch.unsafe_split_with_sizes(tensor, list(split), dim)[1] for split in splits]


def _has_dim(tensor: Tensor, dim: int) -> bool:
    return -tensor.dim() <= dim < tensor.dim()
