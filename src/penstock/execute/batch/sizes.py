"""The sizes of microbatches and slices: the rows of each, on which all values of a batch must agree.

Contexts, images or documents, some for each microbatch, come as a `PreSplit` beside tensors with a row for each sample.
They may add up to the rows of the batch, by chance, in one step of many: hence the rule of `PreSplit` for its rows.
"""

from collections.abc import Sequence

from penstock.errors import PipelineError, count_of
from penstock.execute.batch.leaves import SAMPLES, Axis, Leaf, checked_dim, marking
from penstock.execute.batch.microbatch import PreSplit
from penstock.execute.values.block_masks import is_block_mask
from penstock.execute.values.tree import tensors_of

_MAX_SHOWN_DIVISORS = 10
MeasuredLeaf = tuple[Leaf, int | tuple[int, ...]]
"""A value with its length, or with the lengths of the parts in which it was given."""


def rows_of(leaf: Leaf, num_microbatches: int) -> int | tuple[int, ...] | None:
    """Return the rows of a value, or of each part of a `PreSplit`; None where it has none to count."""
    if isinstance(leaf.value, PreSplit):
        return _rows_of_parts(leaf, num_microbatches) or None
    return None if leaf.dim is None else leaf.length


def leading_rows(measured: Sequence[MeasuredLeaf]) -> int | tuple[int, ...] | None:
    """Return the rows of the first input, or of the target where there is no input; None without both."""
    roots = ("args", "target")
    return next((rows for root in roots for leaf, rows in measured if leaf.place.startswith(root)), None)


def _rows_of_parts(leaf: Leaf, num_microbatches: int) -> tuple[int, ...]:
    """Return the rows of each part of a `PreSplit`; empty where it has no tensors to count."""
    parts = leaf.value.parts
    if len(parts) != num_microbatches:
        raise PipelineError(
            f"{leaf.place}: PreSplit holds {len(parts)} parts for {num_microbatches} microbatches; "
            "expected exactly one part per microbatch"
        )
    if leaf.dim is None:
        return ()
    firsts = [next((tensor for tensor in tensors_of(part) if tensor.dim()), None) for part in parts]
    rows = [
        first.shape[checked_dim(f"{leaf.place}.parts[{index}]", first, leaf.dim, SAMPLES)]
        for index, first in enumerate(firsts)
        if first is not None
    ]
    return tuple(rows) if len(rows) == len(parts) else ()


def even_sizes(leaf: Leaf, num_parts: int, axis: Axis, allow_ragged: bool) -> list[int]:
    """Return sizes of parts that differ by one at most. Raises: PipelineError: the length does not allow it."""
    length = leaf.length
    size, num_larger = divmod(length, num_parts)
    if size == 0:
        fewer = f"use at most {length} {axis.parts}, " if length > 1 else ""
        raise PipelineError(
            f"{leaf} has {count_of(length, axis.unit)} for {num_parts} {axis.parts}; expected at least one "
            f"{axis.unit} each. Pass more, {fewer}or mark it Replicate() in {axis.option}"
        )
    if num_larger and not allow_ragged:
        below, above = size * num_parts, (size + 1) * num_parts
        raise PipelineError(
            f"{leaf} has {length} {axis.unit}s, which {num_parts} {axis.parts} do not divide evenly. "
            f"Pass {below} or {above} {axis.unit}s (a multiple of {num_parts}), use {_said_divisors(length)} "
            f"{axis.parts}, pass allow_ragged=True, or mark it Replicate() in {axis.option} if it has no "
            f"{axis.dimension}"
        )
    return [size + (index < num_larger) for index in range(num_parts)]


def count_parts(leaf: Leaf, size: int, axis: Axis, allow_ragged: bool) -> int:
    """Return how many parts of at most this size a length makes. Raises: PipelineError: they cannot all be of it."""
    length = leaf.length
    if length % size and not allow_ragged:
        raise PipelineError(
            f"{leaf} has {count_of(length, axis.unit)}, which {axis.parts} of {count_of(size, axis.unit)} do not "
            f"divide. Use {_said_divisors(length)} {axis.unit}s in each, or pass allow_ragged=True"
        )
    return max(1, -(-length // size))  # no rows make one part, which `even_sizes` refuses


def require_equal(axis: Axis, measured: Sequence[MeasuredLeaf]) -> None:
    """Make sure that all values are of one length. Raises: PipelineError."""
    for entry in measured:
        if entry[1] != measured[0][1]:
            raise disagreement(axis, measured[0], entry)


def disagreement(axis: Axis, *pair: MeasuredLeaf) -> PipelineError:
    """Say that two values are of different lengths."""
    first, second = (
        f"{leaf} has parts of {size} {axis.unit}s" if isinstance(size, tuple) else f"{leaf} has {size} {axis.unit}s"
        for leaf, size in pair
    )
    if isinstance(pair[0][0].value, PreSplit):
        return PipelineError(f"{first}, but {second}; expected the same {axis.unit}s in both. {_mark(*pair)}")
    fix = f"Mark what has no {axis.dimension} Replicate() in {axis.option}, or give Split(dim) the {axis.dimension}"
    if any(is_block_mask(leaf.value) for leaf, _ in pair):
        fix = (
            "Pass ps.PreSplit([...]) of one BlockMask for each microbatch, or one of a single row, which holds for any"
        )
    return PipelineError(f"{first}, but {second}; expected the same {axis.unit}s in everything that is split. {fix}")


def other_rows(presplit: tuple[Leaf, object], measured: tuple[Leaf, int]) -> PipelineError:
    """Say that a tensor is not cut into the parts of a `PreSplit`."""
    (parts, sizes), (tensor, num_rows) = presplit, measured
    return PipelineError(
        f"{parts} has parts of {sizes} rows, but {tensor} has {num_rows} rows, which are not cut into these: only the "
        "first input, or without inputs the target, decides by its parts how tensors are cut, and they must add up. If "
        f"these are the rows of the microbatches, pass {tensor.place} as a PreSplit of as many. {_mark(presplit)}"
    )


def _mark(*presplits: tuple[Leaf, object]) -> str:
    options = " or ".join(marking(leaf.place) for leaf, _ in presplits)
    return (
        "If the parts of a PreSplit are something other than these rows, such as images, mark it by "
        f"{options}: each microbatch still gets its own part"
    )


def _said_divisors(length: int) -> str:
    """Say into how many equal parts so many rows or positions can be cut."""
    divisors = [number for number in range(1, length + 1) if length % number == 0]
    shown = ", ".join(map(str, divisors[:_MAX_SHOWN_DIVISORS]))
    return f"one of {shown}{', ...' if len(divisors) > _MAX_SHOWN_DIVISORS else ''}"
