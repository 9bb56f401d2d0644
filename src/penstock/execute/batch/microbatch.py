"""Cut a batch into microbatches, all its parts by one rule, and put the outputs of the microbatches together again."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PipelineError
from penstock.execute.values.layouts import TensorInfo
from penstock.execute.values.tree import flatten

MAX_SHOWN_DIVISORS = 10


@dataclass(frozen=True, slots=True)
class Split:
    """Marker: cut tensors into consecutive rows along `dim`; what is no tensor is replicated."""

    dim: int = 0


@dataclass(frozen=True, slots=True)
class Replicate:
    """Marker: every microbatch gets the whole value (a mask or table that has no batch dimension)."""


class PreSplit:
    """A value that its caller has split already: `parts` holds one entry, any tree, per microbatch.

    The rows of an entry are counted on dim 0 of its first tensor, or on the `dim` of a `Split` marker for it. One that
    `is_spent` by its step is empty afterwards, and lets go of each entry after its last use on this rank.
    """

    def __init__(self, parts: Sequence[Any], *, is_spent: bool = False) -> None:
        self.parts = list(parts)
        self.is_spent = is_spent

    def __repr__(self) -> str:
        return f"PreSplit({self.parts!r})"


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """How to split: per part a marker, or a tree of markers (dict, tuple, list); None is the default.

    By default tensors are split on dim 0 and everything else, 0-dim tensors too, is replicated.
    """

    args: Any = None
    kwargs: Any = None
    target: Any = None


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One part of the batch, or one slice of such a part; its tensors are views of the batch's.

    `size` is its number of rows, 0 where nothing in the batch is split. `length` is how much of the sequence a slice
    has; 0 where microbatches are not cut into slices.
    """

    index: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    size: int
    slice: int = 0
    length: int = 0


@dataclass(frozen=True, slots=True)
class _Leaf:
    place: str
    value: Any
    mark: Split | Replicate | None

    @property
    def is_split(self) -> bool:
        if not isinstance(self.value, Tensor) or isinstance(self.mark, Replicate):
            return False
        return self.mark is not None or self.value.dim() > 0

    @property
    def dim(self) -> int:
        return self.mark.dim if isinstance(self.mark, Split) else 0

    @property
    def num_rows(self) -> int:
        return _rows(self.value, self.dim, self.place)


def split_batch(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Any,
    *,
    num_microbatches: int,
    specs: BatchSpec | None = None,
    allow_ragged: bool = False,
) -> list[Microbatch]:
    """Split arguments, keyword arguments and target alike into microbatches, without copying.

    All tensors that are split have the same number of rows. With `allow_ragged` the first (rows mod microbatches)
    microbatches have one row more than the others; without, the rows must divide evenly. Where something is
    `PreSplit`, its parts decide the sizes.

    Raises:
        PipelineError: rows disagree or do not divide; there are fewer rows than microbatches; a spec does not fit.
    """
    if num_microbatches < 1:
        raise PipelineError(f"num_microbatches is {num_microbatches}; expected at least 1")
    batch = (tuple(args), dict(kwargs), target)
    leaves = _leaves(batch, specs)
    sizes = _agreed_sizes(leaves, num_microbatches, allow_ragged)
    columns = [_pieces(leaf, sizes, num_microbatches) for leaf in leaves]
    spec = flatten(batch)[1]
    microbatches = []
    for index in range(num_microbatches):
        own_args, own_kwargs, own_target = spec.unflatten([column[index] for column in columns])
        size = sizes[index] if sizes else 0
        microbatches.append(Microbatch(index, own_args, own_kwargs, own_target, size))
    return microbatches


def batch_signature(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Any,
    *,
    num_microbatches: int,
    specs: BatchSpec | None = None,
    allow_ragged: bool = False,
) -> str:
    """Return a digest that changes when a tensor's shape on any stage may change, the same in every process.

    It covers the tree, shapes, dtypes, `requires_grad`, markers and the values of int, bool and str leaves (they may
    decide shapes); tensors and floats may change their values freely.
    """
    batch = (tuple(args), dict(kwargs), target)
    lines = [flatten(batch)[1].to_text(), f"{num_microbatches} {allow_ragged}"]
    lines += [f"{leaf.place} {leaf.mark} {_describe(leaf.value)}" for leaf in _leaves(batch, specs)]
    return hashlib.blake2b("\n".join(lines).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return repr(TensorInfo.of(value))
    if isinstance(value, PreSplit):
        described = []
        for part in value.parts:
            leaves, spec = flatten(part)
            described.append(f"{spec.to_text()} {[_describe(leaf) for leaf in leaves]}")
        return f"PreSplit {described}"
    shown = repr(value) if type(value) in (int, bool, str) else ""
    return f"{type(value).__module__}.{type(value).__qualname__} {shown}"


def _is_split_mark(mark: Any) -> bool:
    return isinstance(mark, (Split, Replicate))


def _leaves(batch: tuple[tuple[Any, ...], dict[str, Any], Any], specs: BatchSpec | None) -> list[_Leaf]:
    """List every leaf of the batch with its place and marker."""
    specs = specs or BatchSpec()
    # A rank that needs no inputs calls the step with none of them: specs for them are no mistake.
    marks = (specs.args if batch[0] else None, specs.kwargs if batch[1] else None, specs.target)
    marked: list[_Leaf] = []
    for root, value, mark in zip(("args", "kwargs", "target"), batch, marks, strict=True):
        leaves, tree = flatten(value)
        marked += map(_Leaf, tree.places(root), leaves, tree.spread(mark, _is_split_mark, root))
    return marked


def _agreed_sizes(leaves: list[_Leaf], num_microbatches: int, allow_ragged: bool) -> tuple[int, ...]:
    """Return the rows of each microbatch on which all leaves agree; empty where nothing is split."""
    whole = [leaf for leaf in leaves if leaf.is_split]
    for leaf in whole:
        if leaf.num_rows != whole[0].num_rows:
            raise _disagreement(whole[0], f"{whole[0].num_rows} rows", leaf, f"{leaf.num_rows} rows")
    given = [(leaf, sizes) for leaf in leaves if (sizes := _given_sizes(leaf, num_microbatches))]
    for leaf, sizes in given:
        if sizes != given[0][1]:
            raise _disagreement(given[0][0], f"parts of {given[0][1]} rows", leaf, f"parts of {sizes} rows")
    if not given:
        return _even_sizes(whole[0], num_microbatches, allow_ragged) if whole else ()
    first, sizes = given[0]
    if whole and whole[0].num_rows != sum(sizes):
        raise _disagreement(first, f"parts of {sizes} rows", whole[0], f"{whole[0].num_rows} rows")
    return sizes


def _given_sizes(leaf: _Leaf, num_microbatches: int) -> tuple[int, ...]:
    """Return the rows of each part of a `PreSplit`; empty where it has no tensors to count, or is none."""
    if not isinstance(leaf.value, PreSplit):
        return ()
    parts = leaf.value.parts
    if len(parts) != num_microbatches:
        raise PipelineError(
            f"{leaf.place}: PreSplit holds {len(parts)} parts for {num_microbatches} microbatches; "
            "expected exactly one part per microbatch"
        )
    if isinstance(leaf.mark, Replicate):
        return ()
    firsts = [next((x for x in flatten(part)[0] if isinstance(x, Tensor) and x.dim()), None) for part in parts]
    rows = [
        _rows(first, leaf.dim, f"{leaf.place}.parts[{index}]")
        for index, first in enumerate(firsts)
        if first is not None
    ]
    return tuple(rows) if len(rows) == len(parts) else ()


def _rows(tensor: Tensor, dim: int, place: str) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise PipelineError(
            f"{place} of shape {tuple(tensor.shape)} cannot be split on dim {dim}; "
            f"expected a dim below {tensor.dim()}. Give Split() another dim, or mark it Replicate()"
        )
    return tensor.shape[dim]


def _disagreement(first: _Leaf, first_rows: str, other: _Leaf, other_rows: str) -> PipelineError:
    return PipelineError(
        f"{_title(first)} has {first_rows}, but {_title(other)} has {other_rows}; expected the same rows in everything "
        "that is split. Mark what has no batch dimension Replicate(), or give Split(dim) the dimension of the batch"
    )


def _title(leaf: _Leaf) -> str:
    if isinstance(leaf.value, PreSplit):
        return leaf.place
    return f"{leaf.place} (shape {tuple(leaf.value.shape)}, split on dim {leaf.dim})"


def _even_sizes(leaf: _Leaf, num_microbatches: int, allow_ragged: bool) -> tuple[int, ...]:
    rows = leaf.num_rows
    size, num_larger = divmod(rows, num_microbatches)
    if size == 0:
        raise PipelineError(
            f"{_title(leaf)} has {rows} rows for {num_microbatches} microbatches; expected at least one row each. "
            f"Pass a larger batch, use at most {rows} microbatches, or mark it Replicate()"
        )
    if num_larger and not allow_ragged:
        below, above = size * num_microbatches, (size + 1) * num_microbatches
        raise PipelineError(
            f"{_title(leaf)} has {rows} rows, which {num_microbatches} microbatches do not divide evenly. "
            f"Pass {below} or {above} rows (a multiple of {num_microbatches}), use {say_divisors(rows)} microbatches, "
            "pass allow_ragged=True, or mark it Replicate() if it has no batch dimension"
        )
    return tuple(size + (index < num_larger) for index in range(num_microbatches))


def say_divisors(rows: int) -> str:
    """Say into how many equal parts so many rows can be split."""
    divisors = [number for number in range(1, rows + 1) if rows % number == 0]
    shown = ", ".join(map(str, divisors[:MAX_SHOWN_DIVISORS]))
    return f"one of {shown}{', ...' if len(divisors) > MAX_SHOWN_DIVISORS else ''}"


def _pieces(leaf: _Leaf, sizes: tuple[int, ...], num_microbatches: int) -> Sequence[Any]:
    if isinstance(leaf.value, PreSplit):
        return leaf.value.parts
    if leaf.is_split:
        return cut_tensor(leaf.value, sizes, leaf.dim)
    return [leaf.value] * num_microbatches


def cut_tensor(tensor: Tensor, sizes: Sequence[int], dim: int) -> Sequence[Tensor]:
    """Cut a tensor into consecutive pieces that share its memory, each with a version of its own.

    A layer may change one piece in place while another waits for its backward; pieces of `Tensor.split` share one
    version, so that autograd would take the other for changed too.
    """
    return torch.unsafe_split_with_sizes(tensor, list(sizes), dim)


@dataclass(frozen=True, slots=True)
class Concat:
    """Merge rule: one tensor, the microbatches after one another along `dim`."""

    dim: int = 0

    def __call__(self, values: list[Any]) -> Any:
        return torch.cat(values, dim=self.dim)


@dataclass(frozen=True, slots=True)
class Stack:
    """Merge rule: one tensor with a new dimension `dim`, one entry per microbatch."""

    dim: int = 0

    def __call__(self, values: list[Any]) -> Any:
        return torch.stack(values, dim=self.dim)


@dataclass(frozen=True, slots=True)
class Sum:
    """Merge rule: the sum, in the order of the microbatches."""

    def __call__(self, values: list[Any]) -> Any:
        return sum(values[1:], start=values[0])


Reducer = Callable[[list[Any]], Any]


def merge_outputs(outputs: Sequence[Any], spec: Any = None, *, part: str = "microbatch") -> Any:
    """Merge the outputs of the microbatches (or another `part`), trees of one form, leaf by leaf and in order.

    `spec` is a rule or a tree of rules: `Concat`, `Stack`, `Sum` or any callable that gets the list of leaves. By
    default tensors are concatenated on dim 0, 0-dim tensors stacked, and other values collected in a list.

    Raises:
        PipelineError: the outputs differ in form, or a rule cannot merge them.
    """
    if not outputs:
        raise PipelineError(f"there are no outputs to merge; expected one per {part}")
    tree = flatten(outputs[0])[1]
    columns = []
    for index, output in enumerate(outputs):
        leaves, form = flatten(output)
        if form != tree:
            raise PipelineError(
                f"the output of {part} {index} has the form {form.to_text()}, that of {part} 0 "
                f"{tree.to_text()}; expected the same form. Return the same structure for every {part}"
            )
        columns.append(leaves)
    rules = tree.spread(spec, callable, "output")
    places = tree.places("output")
    return tree.unflatten([_merge(*merged) for merged in zip(places, rules, zip(*columns, strict=True), strict=True)])


def _merge(place: str, rule: Reducer | None, values: tuple[Any, ...]) -> Any:
    rule = rule or _default_rule(values)
    try:
        return rule(list(values))
    except (RuntimeError, TypeError, IndexError) as error:
        shown = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in values]
        raise PipelineError(
            f"{place}: {rule} cannot merge {shown} ({error}). Give another rule for it, such as `list` or your own"
        ) from error


def _default_rule(values: tuple[Any, ...]) -> Reducer:
    if not all(isinstance(value, Tensor) for value in values):
        return list
    return Stack() if values[0].dim() == 0 else Concat()
