"""Cut a batch into microbatches along the samples, and these into slices along the sequence; nothing is copied.

All parts of a batch are cut alike. A layer sees one slice at a time: it treats positions alone, or it carries what
later slices need of this one (`carried.py`). The losses of slices make up their microbatch's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PipelineError
from penstock.execute.batch.microbatch import BatchSpec, Microbatch, PreSplit, Replicate, Split
from penstock.execute.values.layouts import leaf_text
from penstock.execute.values.tree import flatten, tensors_of

_MAX_SHOWN_DIVISORS = 10
_Mark = Split | Replicate | None
_Parts = tuple[tuple[Any, ...], dict[str, Any], Any]
"""Arguments, keyword arguments and target."""


@dataclass(frozen=True, slots=True)
class _Axis:
    """Along what a batch is cut, in the words of messages."""

    dimension: str
    unit: str
    parts: str
    option: str
    """Which one holds the markers."""


_SAMPLES = _Axis("batch dimension", "row", "microbatches", "specs")
_SEQUENCE = _Axis("sequence dimension", "position", "slices", "slice_specs")


@dataclass(frozen=True, slots=True)
class BatchRule:
    """How a batch is cut; `specs` are for microbatches, `slice_specs` for slices, whose default dim is `slice_dim`."""

    num_microbatches: int
    num_slices: int = 1
    allow_ragged: bool = False
    specs: BatchSpec | None = None
    slice_dim: int = 1
    slice_specs: BatchSpec | None = None
    takes_any_size: bool = False
    """Whether rows need not divide evenly, and make fewer microbatches where they are fewer: for evaluations."""

    def microbatches(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> list[Microbatch]:
        """Split arguments, keyword arguments and target alike into microbatches.

        All tensors that are split have the same number of rows. With `allow_ragged` the first (rows mod microbatches)
        microbatches have one row more than the others; without, the rows must divide evenly. Where something is
        `PreSplit`, its parts decide the sizes.

        Raises:
            PipelineError: rows disagree or do not divide; there are none, or fewer than microbatches; a spec does not
                fit.
        """
        if self.num_microbatches < 1:
            raise PipelineError(f"num_microbatches is {self.num_microbatches}; expected at least 1")
        batch = (tuple(args), dict(kwargs), target)
        marked = _marked(batch, self.specs)
        leaves = [_leaf_along(_SAMPLES, place, value, mark, 0) for _, place, value, [mark] in marked]
        sizes = self._sizes(leaves) or [0] * self.num_microbatches
        parts = zip(_cut(batch, leaves, sizes), sizes, strict=True)
        return [Microbatch(index, *part, size) for index, (part, size) in enumerate(parts)]

    def slices(self, microbatch: Microbatch) -> list[Microbatch]:
        """Cut a microbatch into consecutive slices.

        With `allow_ragged` the first (length mod slices) slices are longer by one; without, the length must divide
        evenly. Every slice gets the whole of a value that has no such dimension, or that microbatches get whole.

        Raises:
            PipelineError: lengths disagree, do not divide or are too short; the target has no sequence; a spec does not
                fit.
        """
        if self.num_slices == 1:
            return [microbatch]
        parts = (microbatch.args, microbatch.kwargs, microbatch.target)
        leaves = [
            self._of_sequence(root, f"microbatch {microbatch.index}: {place}", value, *marks)
            for root, place, value, marks in _marked(parts, self.specs, self.slice_specs)
        ]
        cut = [(leaf, leaf.length) for leaf in leaves if leaf.dim is not None]
        _require_equal(_SEQUENCE, cut)
        lengths = [0] * self.num_slices
        if cut:
            lengths = _even_sizes(cut[0][0], self.num_slices, _SEQUENCE, self.allow_ragged)
        return [
            Microbatch(microbatch.index, *part, microbatch.size, index, lengths[index])
            for index, part in enumerate(_cut(parts, leaves, lengths))
        ]

    def signature(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> str:
        """Return a text that changes when a tensor's shape on any stage may change, the same in every process.

        It covers the rule, the tree, shapes, dtypes, `requires_grad`, memory formats, and the values of bool and str
        leaves. Numbers may change freely, as tensors may: what follows from them travels with the outputs.
        """
        leaves, tree = flatten((tuple(args), dict(kwargs), target))
        return "\n".join([repr(self), tree.to_text(), *map(_described, leaves)])

    def _sizes(self, leaves: Sequence["_Leaf"]) -> list[int]:
        """The rows of each microbatch on which all leaves agree; empty where nothing is split."""
        tensors = [leaf for leaf in leaves if isinstance(leaf.value, Tensor) and leaf.dim is not None]
        whole = [(leaf, leaf.length) for leaf in tensors]
        _require_equal(_SAMPLES, whole)
        given = [(leaf, sizes) for leaf in leaves if (sizes := _given_sizes(leaf, self.num_microbatches))]
        _require_equal(_SAMPLES, given)
        if given and whole and whole[0][1] != sum(given[0][1]):
            raise _disagreement(_SAMPLES, given[0], whole[0])
        if given:
            return list(given[0][1])
        if not whole:
            return []
        leaf, num_rows = whole[0]
        num_parts = self.num_microbatches
        if self.takes_any_size:
            num_parts = max(1, min(num_parts, num_rows))
        return _even_sizes(leaf, num_parts, _SAMPLES, self.allow_ragged or self.takes_any_size)

    def _of_sequence(self, root: str, place: str, value: Any, outer: _Mark, mark: _Mark) -> "_Leaf":
        if mark is None and isinstance(outer, Replicate):
            return _Leaf(place, value, None)
        leaf = _leaf_along(_SEQUENCE, place, value, mark, self.slice_dim)
        has_dimensions = isinstance(value, Tensor) and value.dim() > 0
        if root == "target" and has_dimensions and leaf.dim is None and mark is None:
            raise PipelineError(
                f"{place} of shape {tuple(value.shape)} has no dimension {self.slice_dim} to cut into slices, so every "
                "slice's loss would count all of it. Give slice_dim, or Split(dim) in slice_specs, the dimension of "
                "the sequence; or mark it Replicate() if the loss of a slice needs the whole target"
            )
        return leaf


@dataclass(frozen=True, slots=True)
class _Leaf:
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


_Measured = tuple[_Leaf, int | tuple[int, ...]]
"""With its length, or those of the parts in which it was given."""


def _marked(parts: _Parts, *specs: BatchSpec | None) -> Iterator[tuple[str, str, Any, list[_Mark]]]:
    """Each value of a batch with the name of its part, its place and its marker in each of the specs."""
    for root, value in zip(("args", "kwargs", "target"), parts, strict=True):
        leaves, tree = flatten(value)
        # A rank that needs no inputs calls the step with none of them: specs for them are no mistake.
        given = [getattr(each, root, None) if leaves else None for each in specs]
        columns = [tree.spread(each, _is_mark, root) for each in given]
        for place, leaf, *marks in zip(tree.places(root), leaves, *columns, strict=True):
            yield root, place, leaf, marks


def _is_mark(mark: Any) -> bool:
    return isinstance(mark, Split | Replicate)


def _leaf_along(axis: _Axis, place: str, value: Any, mark: _Mark, default_dim: int) -> _Leaf:
    if isinstance(mark, Replicate) or not isinstance(value, (Tensor, PreSplit)):
        return _Leaf(place, value, None)
    dim = default_dim if mark is None else mark.dim
    if isinstance(value, PreSplit) or _has_dim(value, dim):
        return _Leaf(place, value, dim)
    return _Leaf(place, value, None if mark is None else _checked_dim(place, value, dim, axis))


def _given_sizes(leaf: _Leaf, num_microbatches: int) -> tuple[int, ...]:
    """The rows of each part of a `PreSplit`; empty where it has no tensors to count, or is none."""
    if not isinstance(leaf.value, PreSplit):
        return ()
    parts = leaf.value.parts
    if len(parts) != num_microbatches:
        raise PipelineError(
            f"{leaf.place}: PreSplit holds {len(parts)} parts for {num_microbatches} microbatches; "
            "expected exactly one part per microbatch"
        )
    if leaf.dim is None:
        return ()
    firsts = [next((each for each in tensors_of(part) if each.dim()), None) for part in parts]
    rows = [
        first.shape[_checked_dim(f"{leaf.place}.parts[{index}]", first, leaf.dim, _SAMPLES)]
        for index, first in enumerate(firsts)
        if first is not None
    ]
    return tuple(rows) if len(rows) == len(parts) else ()


def _even_sizes(leaf: _Leaf, num_parts: int, axis: _Axis, allow_ragged: bool) -> list[int]:
    length = leaf.length
    size, num_larger = divmod(length, num_parts)
    if size == 0:
        raise PipelineError(
            f"{leaf} has {length} {axis.unit}s for {num_parts} {axis.parts}; expected at least one {axis.unit} each. "
            f"Pass more, use at most {length} {axis.parts}, or mark it Replicate() in {axis.option}"
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


def _require_equal(axis: _Axis, found: Sequence[_Measured]) -> None:
    for each in found:
        if each[1] != found[0][1]:
            raise _disagreement(axis, found[0], each)


def _disagreement(axis: _Axis, *found: _Measured) -> PipelineError:
    one, other = (
        f"{leaf} has parts of {size} {axis.unit}s" if isinstance(size, tuple) else f"{leaf} has {size} {axis.unit}s"
        for leaf, size in found
    )
    return PipelineError(
        f"{one}, but {other}; expected the same {axis.unit}s in everything that is split. Mark what has no "
        f"{axis.dimension} Replicate() in {axis.option}, or give Split(dim) the {axis.dimension}"
    )


def _checked_dim(place: str, tensor: Tensor, dim: int, axis: _Axis) -> int:
    if not _has_dim(tensor, dim):
        raise PipelineError(
            f"{place} of shape {tuple(tensor.shape)} cannot be split on dim {dim}; expected a dim below "
            f"{tensor.dim()}. Give Split() in {axis.option} another dim, or mark it Replicate()"
        )
    return dim


def _cut(batch: _Parts, leaves: Sequence[_Leaf], sizes: Sequence[int]) -> list[_Parts]:
    tree = flatten(batch)[1]
    columns = [leaf.pieces(sizes) for leaf in leaves]
    return [tree.unflatten([column[index] for column in columns]) for index in range(len(sizes))]


def _described(leaf: Any) -> str:
    if not isinstance(leaf, PreSplit):
        return leaf_text(leaf, with_order=True)
    parts = [flatten(part) for part in leaf.parts]
    return f"PreSplit {[(tree.to_text(), *map(_described, leaves)) for leaves, tree in parts]}"


def _said_divisors(length: int) -> str:
    """Into how many equal parts so much can be cut."""
    divisors = [number for number in range(1, length + 1) if length % number == 0]
    shown = ", ".join(map(str, divisors[:_MAX_SHOWN_DIVISORS]))
    return f"one of {shown}{', ...' if len(divisors) > _MAX_SHOWN_DIVISORS else ''}"


def _has_dim(tensor: Tensor, dim: int) -> bool:
    return -tensor.dim() <= dim < tensor.dim()
