"""Microbatches, the markers by which a batch is cut into them, and the rules by which their outputs are merged."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pprint import saferepr
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PipelineError
from penstock.execute.values.tree import flatten

ANY_KEYWORD = "**"
"""Stands for all names among the names of keywords; no parameter is called so."""
MicrobatchKey = tuple[int, int]
"""The numbers of a microbatch and of one of its slices."""


@dataclass(frozen=True, slots=True)
class Split:
    """Marker: cut tensors into consecutive rows along `dim`; what is no tensor is replicated."""

    dim: int = 0


@dataclass(frozen=True, slots=True)
class Replicate:
    """Marker: every microbatch gets the whole value (a mask or table that has no batch dimension).

    Of a `PreSplit` every microbatch gets its entry; its rows are not counted.
    """


class PreSplit:
    """A value that its caller has split already: `parts` holds one entry, any tree, per microbatch.

    As the first input, or as the target of a rank without inputs, its entries decide the rows of the microbatches, and
    whole tensors are cut alike. As anything else its entries must have the rows of the microbatches, or it is marked
    `Replicate()`: then each microbatch gets its entry, and no rows are counted. The rows of an entry are those on dim 0
    of its first tensor, or on the `dim` of a `Split` marker; an entry without tensors has none. One that
    `is_consumed` by its step is empty afterwards, and releases each entry after its last use on this rank.
    """

    def __init__(self, parts: Sequence[Any], *, is_consumed: bool = False) -> None:
        self.parts = list(parts)
        self.is_consumed = is_consumed

    def __repr__(self) -> str:
        return f"PreSplit({self.parts!r})"


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """How to split: per part a marker, or a tree of markers (dict, tuple, list); None is the default.

    By default tensors are split on dim 0, and a `BlockMask` along its batch; everything else, 0-dim tensors too, is
    replicated. Tensors within lists, tuples, dicts and their subclasses, `UserDict`, dataclasses and classes registered
    with torch's pytrees are split too. Another object, or a function that reads a tensor, is refused where that has as
    many rows as the batch; marked `Replicate()`, it is replicated.
    """

    args: Any = None
    kwargs: Any = None
    target: Any = None


def describe_specs(specs: BatchSpec | None) -> str:
    """Return one line that is the same for specs that split a batch alike, in whatever order they name its parts."""
    marks = [(field.name, getattr(specs, field.name, None)) for field in fields(BatchSpec)]
    return ", ".join(f"{name}={saferepr(mark)}" for name, mark in marks if mark is not None) or "none"


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


def sized(microbatch: Microbatch, size: int, length: int) -> Microbatch:
    """Return a microbatch with these rows and positions, itself where it has them."""
    # A copy of a frozen dataclass takes as long as a message, and most ranks know all sizes by themselves.
    is_so = microbatch.size == size and microbatch.length == length
    return microbatch if is_so else replace(microbatch, size=size, length=length)


def without_data(microbatch: Microbatch) -> Microbatch:
    """Return a microbatch of the same number and size that holds nothing."""
    return replace(microbatch, args=(), kwargs={}, target=None)


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


def is_merge_spec(spec: Any) -> bool:
    """Whether this is a merge rule, or a tree of rules, as `merge_outputs` takes it."""
    if spec is None or callable(spec):
        return True
    rules = spec.values() if isinstance(spec, dict) else spec
    return isinstance(spec, (dict, tuple, list)) and all(map(is_merge_spec, rules))


def merge_outputs(outputs: Sequence[Any], spec: Any = None, *, part: str = "microbatch") -> Any:
    """Merge the outputs of the microbatches (or another `part`), trees of one form, leaf by leaf and in order.

    `spec` is a rule or a tree of rules: `ps.Concat`, `ps.Stack`, `ps.Sum` or any callable that gets the list of
    leaves. By default tensors are concatenated on dim 0, 0-dim tensors stacked, and other values collected in a list.

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
    merges = zip(tree.places("output"), rules, zip(*columns, strict=True), strict=True)
    return tree.unflatten([_merge(place, rule, values) for place, rule, values in merges])


def _merge(place: str, rule: Reducer | None, values: tuple[Any, ...]) -> Any:
    rule = rule or _default_rule(values)
    try:
        return rule(list(values))
    except (RuntimeError, TypeError, IndexError) as error:
        shown = [tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__ for value in values]
        raise PipelineError(
            f"{place}: {rule} cannot merge {shown} ({error}). Give another rule for it, such as `list` or your own"
        ) from error


def _default_rule(values: tuple[Any, ...]) -> Reducer:
    if not all(isinstance(value, Tensor) for value in values):
        return list
    return Stack() if values[0].dim() == 0 else Concat()
