"""`Routes`: what each part of a forward needs of earlier parts, and how it goes on to the next one.

    submodules     words        blocks.0       blocks.1       head
    segments         0      │      1       │      2       │    3          the code behind each point, up to the next one
    carried                 │ words#0.0    │ words#0.0    │               the leaves that later segments need

A part hands the first argument of its next point on to the next part, with the leaves that are carried there. What the
code before a point computes of leaves is computed again by each part that needs it.
"""

import itertools
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PenstockError
from penstock.models.cutting.label_table import UNKNOWN, LabelTable
from penstock.models.cutting.part_state import PartState
from penstock.models.cutting.trees import PLAIN_TYPES, items_in, map_items
from penstock.models.cutting.undocumented import version_of

BEGIN = "before its first point"


class LeafRef:
    """Stands in a tree for a leaf that comes from another part, by its label."""

    def __init__(self, label: str) -> None:
        self.label = label

    def __eq__(self, other: object) -> bool:
        """Whether the other one stands for the same leaf."""
        return isinstance(other, LeafRef) and other.label == self.label

    def __hash__(self) -> int:
        return hash(self.label)


@dataclass(slots=True)
class Form:
    """A tree of constants and leaves, such as the arguments of a point."""

    tree: Any
    labels: frozenset[str]
    is_whole: bool
    """Whether each of its tensors is a constant without a gradient, or a leaf as it was made."""
    versions: tuple[int, ...]
    """How often each constant tensor of the tree had been changed in place."""

    @property
    def is_unchanged(self) -> bool:
        """Whether no constant was changed in place since."""
        return self.versions == versions_of(self.tree)

    def fill(self, leaves: Mapping[str, Any]) -> Any:
        """Return the tree with its leaves."""
        return map_items(lambda item: leaves[item.label] if isinstance(item, LeafRef) else item, self.tree)


def input_label(name: str, index: int) -> str:
    """Return the label of a computed tensor of the first argument of the point `name`."""
    return f"{name}#input.{index}"


def is_input_label(name: str, label: str) -> bool:
    """Whether a label is that of a computed tensor of the first argument of the point `name`."""
    return label.startswith(f"{name}#input.")


def form_of(value: Any, table: LabelTable) -> Form:
    """Return a value with references in the place of its leaves."""
    is_whole = True

    def reference(item: Any) -> Any:
        nonlocal is_whole
        if not isinstance(item, Tensor):
            return item
        label = table.leaf_label(item)
        if label is not None:
            return LeafRef(label)
        is_whole = is_whole and not (item.requires_grad or table.labels_of(item))
        return item

    tree = map_items(reference, value)
    return Form(tree, table.labels_of(value), is_whole, versions_of(tree))


class ArgumentForms:
    """Makes the forms of further arguments; most blocks get the same objects, such as a mask, and so the same form."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._arguments: Any = None
        self._form: Form | None = None

    def form(self, args: tuple[Any, ...], kwargs: dict[str, Any], table: LabelTable) -> Form:
        """Return the form of the arguments of one call."""
        key = (*map(id, args), *kwargs, *map(id, kwargs.values()))
        if not _is_fixed((*args, *kwargs.values())):
            return form_of((args, kwargs), table)
        if self._form is None or key != self._key or not self._form.is_unchanged:
            self._key, self._arguments = key, (args, kwargs)  # kept, so that no other object gets an id of these
            self._form = form_of((args, kwargs), table)
        return self._form


def _is_fixed(value: Any) -> bool:
    """Whether what a form holds of a value stays the same while the value does, but for changes of tensors in place."""
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return type(value) in PLAIN_TYPES or isinstance(value, (Tensor, bool, int, float, str, PartState))


@dataclass(slots=True)
class PointRoute:
    """What one run without values has found of a point."""

    name: str
    input: Form
    """The first argument."""
    arguments: Form
    """The further arguments: a pair of those by position and those by keyword."""
    runs_alone: bool
    """Whether it is called as a module, in the modes in which the forward was called, as of gradients and autocast."""
    first_keyword: str | None = None
    """The keyword of its first argument; None for one by position."""
    output_labels: tuple[str | None, ...] = ()
    """The labels of the tensors that it returns; None for one that it was given."""
    input_labels: tuple[str | None, ...] = ()
    """The labels of the tensors of its first argument; None for one that follows from the batch."""
    carried: tuple[str, ...] = ()
    """The labels of the leaves that travel to its part, beside its first argument."""

    def arriving(self, changed: AbstractSet[str]) -> set[str]:
        """Return the labels of what its part has when it begins; `changed` are leaves that are changed in place."""
        return {*self.carried, *(label for label in self.input_labels if label is not None and label not in changed)}

    def with_first(
        self, first: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call, with the first one in its place."""
        if self.first_keyword is None:
            return (first, *args), kwargs
        return args, {self.first_keyword: first, **kwargs}


@dataclass(slots=True)
class Routes:
    """What one run of the forward without values has found."""

    points: Sequence[PointRoute]
    """In the order of the forward."""
    changed: frozenset[str]
    """The labels of leaves that the forward changes in place."""
    shapes: Mapping[str, tuple[tuple[int, ...], ...]]
    """The shapes of the tensors that each call of a submodule returns."""
    outputs: Mapping[str, Any]
    """What each call of a submodule returns, without values; not of one that returns a tensor that it was given."""
    types: Mapping[str, torch.dtype]
    """The types of leaves for which the forward asks, by label."""
    reads: Mapping[str, set[str]]
    """The attributes of submodules that the forward reads and that are no tensors."""
    short: frozenset[str] = field(default_factory=frozenset)
    """The points whose parts may run without the forward: their output goes on as it is."""

    def carried_before(self, position: int) -> tuple[str, ...]:
        """Return the labels of what a part gets that begins at the point of this position; nothing behind the last."""
        return self.points[position].carried if position < len(self.points) else ()


def versions_of(tree: Any) -> tuple[int, ...]:
    """Return how often each tensor of a tree was changed in place."""
    return tuple(version_of(item) for item in items_in(tree) if isinstance(item, Tensor))


def carry(
    points: Sequence[PointRoute], needs: Mapping[int, set[str]], made_in: Mapping[str, int], changed: set[str]
) -> None:
    """Find what is carried to each point: the leaves made before it that a segment from there on needs.

    `needs` are the labels that each segment needs, and `made_in` is the segment in which each leaf is made.

    Raises:
        PenstockError: a segment needs what is made behind it, or by nothing that is known.
    """
    for segment, labels in needs.items():
        for label in labels:
            if made_in.get(label, segment + 1) > segment:
                raise PenstockError(_lack(label, f"behind {points[segment - 1].name!r}" if segment else BEGIN))
    open_labels: set[str] = set()
    for position in reversed(range(len(points))):
        point, segment = points[position], position + 1
        open_labels = {label for label in open_labels | needs.get(segment, set()) if made_in[label] < segment}
        point.carried = tuple(sorted(open_labels - (set(point.input_labels) - changed)))


def _lack(label: str, place: str) -> str:
    if label == UNKNOWN:
        return (
            f"the forward computes {place} with a parameter of a submodule that it does not read from there, or by "
            "what is not followed, such as torch.func, TorchScript or sparse tensors; compute it within a submodule "
            "that is a point of the cut"
        )
    return (
        f"the forward needs {label!r} {place}, where no layer has it yet; use the parameters of a submodule within it, "
        "or name the points in the order of calls"
    )


def short_points(points: Sequence[PointRoute], changed: set[str], written: set[str]) -> frozenset[str]:
    """Return the points whose parts can run without the forward; `written` are submodules whose attributes it sets."""
    names = []
    for point, following in itertools.pairwise(points):
        arriving = point.arriving(changed)
        leaving = arriving | set(point.output_labels)
        is_alone = point.runs_alone and point.name not in written
        has_arguments = point.arguments.is_whole and point.arguments.is_unchanged and point.arguments.labels <= arriving
        goes_on = following.input.is_whole and following.input.is_unchanged and following.input.labels <= leaving
        if is_alone and has_arguments and goes_on and set(following.carried) <= leaving and not changed & leaving:
            names.append(point.name)
    return frozenset(names)


def are_equal(routes: Routes, other_routes: Routes) -> bool:
    """Whether two runs have found the same, constants by their values."""
    pairs = list(zip(routes.points, other_routes.points, strict=True))
    same_labels = all(point.carried == other.carried for point, other in pairs)
    return same_labels and all(
        have_equal_values(form.tree, other_form.tree)
        for point, other in pairs
        for form, other_form in ((point.input, other.input), (point.arguments, other.arguments))
    )


def have_equal_values(value: Any, other: Any) -> bool:
    """Whether two trees have equal items; tensors without values are equal where their forms are."""
    items, other_items = items_in(value), items_in(other)
    return len(items) == len(other_items) and all(map(_equal_items, items, other_items))


def _equal_items(item: Any, other: Any) -> bool:
    if not (isinstance(item, Tensor) and isinstance(other, Tensor)):
        return item is other or bool(type(item) is type(other) and item == other)
    if (item.shape, item.dtype, item.device) != (other.shape, other.dtype, other.device):
        return False
    if item.is_meta:
        return True
    return torch.equal(item, other) or bool(((item == other) | (item.isnan() & other.isnan())).all())
