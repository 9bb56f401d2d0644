"""Cut a batch into microbatches along the samples, and these into slices along the sequence; nothing is copied.

All parts of a batch are cut alike. An object that cannot be cut goes whole to every microbatch, and is refused where it
holds rows of the batch (`holders.py`). A layer sees one slice at a time: it treats positions alone, or it carries what
later slices need of this one (`carried.py`). The losses of slices make up their microbatch's.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.errors import PipelineError
from penstock.execute.batch.holders import rows_within
from penstock.execute.batch.input_graphs import refuse_shared_graphs
from penstock.execute.batch.leaves import SAMPLES, SEQUENCE, Leaf, Mark, leaf_along, marking
from penstock.execute.batch.microbatch import BatchSpec, Microbatch, PreSplit, Replicate, Split
from penstock.execute.batch.sizes import count_parts, even_sizes, leading_rows, other_rows, require_equal, rows_of
from penstock.execute.values.block_masks import is_block_mask
from penstock.execute.values.layouts import leaf_text
from penstock.execute.values.tree import CONSTANTS, flatten

_Parts = tuple[tuple[Any, ...], dict[str, Any], Any]
"""Arguments, keyword arguments and target of a batch or of a part of one."""
_MarkedValue = tuple[str, str, Any, list[Mark]]
"""A value of a batch: the name of its part, its place, itself, and its marker in each of some specs."""


@dataclass(frozen=True, slots=True)
class BatchRule:
    """How a batch is cut; `specs` are for microbatches, `slice_specs` for slices, whose default dim is `slice_dim`."""

    num_microbatches: int
    num_slices: int = 1
    allow_ragged: bool = False
    specs: BatchSpec | None = None
    slice_dim: int = 1
    slice_specs: BatchSpec | None = None
    microbatch_size: int | None = None
    """Rows of a microbatch, from which their number follows where a batch has rows; None: the number is given."""
    takes_any_size: bool = False
    """Whether rows need not divide evenly, and make fewer microbatches where they are fewer: for evaluations."""

    def microbatches(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> list[Microbatch]:
        """Split arguments, keyword arguments and target of a batch along the samples (rows) into microbatches.

        All tensors that are split must have the same number of rows. With `allow_ragged` the first (rows mod
        microbatches) microbatches have one row more than the others; without it, the rows must divide evenly. A
        `PreSplit` is a value that the caller has split already: where the first input is one, or the target of a batch
        without inputs, its parts decide the sizes instead. Any other `PreSplit` must have parts of these sizes, or be
        marked `Replicate`: then the microbatches get its parts, and its rows are not compared.

        Raises:
            PipelineError: rows disagree or do not divide; there are none, or fewer than microbatches; a spec does not
                fit; something that cannot be cut holds rows of the batch; an input was computed with gradients.
        """
        if self.num_microbatches < 1:
            raise PipelineError(f"num_microbatches is {self.num_microbatches}; expected at least 1")
        batch = (tuple(args), dict(kwargs), target)
        marked_values = list(_marked_values(batch, self.specs))
        leaves = [leaf_along(SAMPLES, place, value, mark, 0) for _, place, value, [mark] in marked_values]
        sizes = self._sizes(leaves) or [0] * self.num_microbatches  # rows of each microbatch
        # An evaluation of few rows makes fewer microbatches. `rows_of` then refuses a PreSplit with more parts.
        for leaf in leaves if len(sizes) < self.num_microbatches else ():
            rows_of(leaf, len(sizes))
        # An object that cannot be cut would go whole to every microbatch, so it must not hold rows of the batch. A
        # batch without rows is not examined: an empty tensor in such an object would seem to hold them.
        if len(sizes) > 1 and any(sizes) and (reason := _uncut_rows(marked_values).get(sum(sizes))):
            raise PipelineError(reason)
        if len(sizes) > 1 and not self.takes_any_size:
            # Not targets, too, as those of a teacher are: a loss may well detach them.
            inputs = [leaf for leaf, (root, *_) in zip(leaves, marked_values, strict=True) if root != "target"]
            refuse_shared_graphs(inputs, len(sizes))
        parts = zip(_cut(batch, leaves, sizes), sizes, strict=True)
        return [Microbatch(index, *part, size) for index, (part, size) in enumerate(parts)]

    def uncut_rows(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> dict[int, str]:
        """Return why a batch of so many rows is refused, by the rows of what is held by objects that cannot be cut."""
        return _uncut_rows(_marked_values((tuple(args), dict(kwargs), target), self.specs))

    def slices(self, microbatch: Microbatch) -> list[Microbatch]:
        """Cut a microbatch along the sequence into consecutive slices; a rule of one slice returns it as it is.

        With `allow_ragged` the first (length mod slices) slices are longer by one position; without it, the length of
        the sequence must divide evenly. Every slice gets the whole of a value that has no sequence dimension, and of a
        value that is marked `Replicate` for microbatches.

        Raises:
            PipelineError: lengths disagree, do not divide or are too short; the target has no sequence; a spec does not
                fit.
        """
        if self.num_slices == 1:
            return [microbatch]
        batch = (microbatch.args, microbatch.kwargs, microbatch.target)
        # A leaf is a tensor (or another value) in the nested arguments, with the dimension along which it is cut, or
        # None. Its place, such as "args[0]", names it in errors; its marks are those of the caller's specs.
        leaves = [
            self._sequence_leaf(root, f"microbatch {microbatch.index}: {place}", value, *marks)
            for root, place, value, marks in _marked_values(batch, self.specs, self.slice_specs)
        ]
        cut_leaves = [leaf for leaf in leaves if leaf.dim is not None]
        require_equal(SEQUENCE, [(leaf, leaf.length) for leaf in cut_leaves])
        lengths = [0] * self.num_slices  # positions of each slice
        if cut_leaves:
            lengths = even_sizes(cut_leaves[0], self.num_slices, SEQUENCE, self.allow_ragged)
        return [
            Microbatch(microbatch.index, *part, microbatch.size, index, lengths[index])
            for index, part in enumerate(_cut(batch, leaves, lengths))
        ]

    def signature(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> str:
        """Return a text that changes when a tensor's shape on any stage may change, the same in every process.

        It covers the rule, the tree, shapes, dtypes, `requires_grad`, memory formats, and the values of bool and str
        leaves. Numbers may change freely, as tensors may: what follows from them travels with the outputs.
        """
        leaves, tree = flatten((tuple(args), dict(kwargs), target))
        return "\n".join([repr(self), tree.to_text(), *map(_text_of, leaves)])

    def _sizes(self, leaves: Sequence[Leaf]) -> list[int]:
        """Return the rows of each microbatch on which all leaves agree; empty where nothing is split."""
        presplit_leaf = next((leaf for leaf in leaves if isinstance(leaf.value, PreSplit)), None)
        cut_leaf = next(
            (leaf for leaf in leaves if leaf.dim is not None and not isinstance(leaf.value, PreSplit)), None
        )
        num_parts = self.num_microbatches
        is_known = self.takes_any_size and cut_leaf is not None
        if self.microbatch_size and presplit_leaf is not None and not is_known:
            # Marked `Replicate`, too: a rank without rows does not know how many parts there must be.
            raise PipelineError(
                f"{presplit_leaf.place} is a PreSplit, whose parts have a number and sizes of their own, beside "
                f"microbatch_size = {self.microbatch_size}; pass tensors, or give the pipeline microbatches="
            )
        # An evaluation of few rows has fewer microbatches, and so a PreSplit beside them has fewer parts.
        if self.takes_any_size and cut_leaf is not None:
            num_parts = len(self._even_sizes(cut_leaf, cut_leaf.length))
        measured = [(leaf, rows) for leaf in leaves if (rows := rows_of(leaf, num_parts)) is not None]
        tensors = [(leaf, rows) for leaf, rows in measured if isinstance(rows, int)]
        presplits = [(leaf, rows) for leaf, rows in measured if isinstance(rows, tuple)]
        require_equal(SAMPLES, tensors)
        require_equal(SAMPLES, presplits)
        if not presplits:
            return self._even_sizes(*tensors[0]) if tensors else []
        sizes = list(presplits[0][1])
        if tensors and not self._may_be_cut(*tensors[0], sizes, leads=isinstance(leading_rows(measured), tuple)):
            raise other_rows(presplits[0], tensors[0])
        return sizes

    def _may_be_cut(self, leaf: Leaf, num_rows: int, sizes: list[int], *, leads: bool) -> bool:
        """Whether a tensor is cut into the rows of a `PreSplit`, which `leads` where it decides for others."""
        if leads:
            return num_rows == sum(sizes)
        is_ragged = self.allow_ragged or self.takes_any_size
        can_be_cut = num_rows >= len(sizes) and (is_ragged or num_rows % len(sizes) == 0)
        return can_be_cut and sizes == self._even_sizes(leaf, num_rows)

    def _even_sizes(self, leaf: Leaf, num_rows: int) -> list[int]:
        is_ragged = self.allow_ragged or self.takes_any_size
        num_parts = self.num_microbatches
        if self.microbatch_size:
            num_parts = count_parts(leaf, self.microbatch_size, SAMPLES, is_ragged)
        if self.takes_any_size:
            num_parts = max(1, min(num_parts, num_rows))
        return even_sizes(leaf, num_parts, SAMPLES, is_ragged)

    def _sequence_leaf(self, root: str, place: str, value: Any, batch_mark: Mark, mark: Mark) -> Leaf:
        if mark is None and isinstance(batch_mark, Replicate):
            return Leaf(place, value, None)
        leaf = leaf_along(SEQUENCE, place, value, mark, self.slice_dim)
        has_dimensions = isinstance(value, Tensor) and value.dim() > 0
        if root == "target" and has_dimensions and leaf.dim is None and mark is None:
            raise PipelineError(
                f"{place} of shape {tuple(value.shape)} has no dimension {self.slice_dim} to cut into slices, so every "
                "slice's loss would count all of it. Give slice_dim, or Split(dim) in slice_specs, the dimension of "
                "the sequence; or mark it Replicate() if the loss of a slice needs the whole target"
            )
        return leaf


def _marked_values(parts: _Parts, *specs: BatchSpec | None) -> Iterator[_MarkedValue]:
    """Yield each value of a batch with the name of its part, its place and its marker in each of the specs."""
    for root, value in zip(("args", "kwargs", "target"), parts, strict=True):
        leaves, tree = flatten(value)
        # A rank that needs no inputs calls the step with none of them: specs for them are no mistake.
        spec_trees = [getattr(spec, root, None) if leaves else None for spec in specs]
        columns = [tree.spread(spec_tree, _is_mark, root) for spec_tree in spec_trees]
        for place, leaf, *marks in zip(tree.places(root), leaves, *columns, strict=True):
            yield root, place, leaf, marks


def _uncut_rows(marked_values: Iterable[_MarkedValue]) -> dict[int, str]:
    reasons: dict[int, str] = {}
    for _, place, value, [mark] in marked_values:
        if isinstance(value, (Tensor, PreSplit, *CONSTANTS)) or isinstance(mark, Replicate) or is_block_mask(value):
            continue
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        for num_rows, way in rows_within(value, 0 if mark is None else mark.dim).items():
            reason = (
                f"{place}{way} has {num_rows} rows, as the batch has, but {'belongs to' if way else 'is'} a {kind}, "
                "which cannot be cut: every microbatch would get all of it. Pass ps.PreSplit([...]) of one for each "
                "microbatch, or its tensors as arguments of their own (arrays by torch.from_numpy), or register a "
                "container by torch.utils._pytree.register_pytree_node. If these are no rows of the batch, mark it by "
                f"{marking(place)}"
            )
            reasons.setdefault(num_rows, reason)
    return reasons


def _is_mark(mark: Any) -> bool:
    return isinstance(mark, Split | Replicate)


def _cut(batch: _Parts, leaves: Sequence[Leaf], sizes: Sequence[int]) -> list[_Parts]:
    tree = flatten(batch)[1]
    columns = [leaf.pieces(sizes) for leaf in leaves]
    return [tree.unflatten([column[index] for column in columns]) for index in range(len(sizes))]


def _text_of(leaf: Any) -> str:
    if not isinstance(leaf, PreSplit):
        return leaf_text(leaf, with_order=True)
    parts = [flatten(part) for part in leaf.parts]
    return f"PreSplit {[(tree.to_text(), *map(_text_of, leaves)) for leaves, tree in parts]}"
