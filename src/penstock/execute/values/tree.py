"""Trees of values: what crosses a stage boundary or makes up a batch, taken apart into leaves and put together again.

Tuples, lists, dicts (keys `str` or `int`, order kept), named tuples, dataclass instances and None are branches. So are
what is registered with torch's pytrees and subclasses of dict and UserDict, unless all that they hold is numbers, texts
and tensors without dimensions. Every other object is a leaf.
"""

from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, cached_property
from inspect import signature
from types import NoneType
from typing import Any, cast

import torch
from torch import Tensor

from penstock.errors import PipelineError, nearest
from penstock.execute.undocumented_trees import rebuilt_registered, registered_children
from penstock.execute.values.block_masks import is_block_mask

Name = int | str

PLAIN: dict[str, type] = {"tuple": tuple, "list": list, "dict": dict, "OrderedDict": OrderedDict}
"""Branches without fields that may travel between ranks."""
CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""Classes of leaves that hold no tensor: a mapping or registered container of these alone stays as it is."""


@dataclass(frozen=True, slots=True)
class TreeSpec:
    """The shape of a tree: `container` is the branch's class, `object` for a leaf and `NoneType` for None.

    `names` are keys, positions or field names, one per child. Equal specs put equal leaves together to equal trees,
    but for what a class of another kind keeps beside its children.
    """

    container: type
    names: tuple[Name, ...] = ()
    children: tuple["TreeSpec", ...] = ()
    num_leaves: int = field(default=0, compare=False)
    context: Any = field(default=None, compare=False)
    """A part of a branch beside its children: torch's spec of a registered class, attributes of a mapping, or the names
    of fields that a dataclass makes of the others."""

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Put the leaves, in the order of `flatten`, back into a tree; a class is built by its constructor."""
        if len(leaves) != self.num_leaves:
            raise PipelineError(
                f"tree {self.to_text()}: got {len(leaves)} leaves, expected {self.num_leaves}; "
                "pass one leaf for each place of the tree"
            )
        return leaves[0] if self.container is object else _build(self, iter(leaves))

    def to_text(self) -> str:
        """Return one line such as `(*, {'mask': *}, Point(x=*, y=None))`; a star is a leaf."""
        inner = [child.to_text() for child in self.children]
        if self.container is object:
            return "*"
        if self.container is NoneType:
            return "None"
        if self.container is tuple:
            return f"({', '.join(inner)}{',' * (len(inner) == 1)})"
        if self.container is list:
            return f"[{', '.join(inner)}]"
        entries = zip(self.names, inner, strict=True)
        pairs = [f"{name}={text}" if self.has_fields else f"{name!r}: {text}" for name, text in entries]
        if self.has_fields:
            return f"{self.container.__qualname__}({', '.join(pairs)})"
        return f"{'' if self.container is dict else self.container.__qualname__}{{{', '.join(pairs)}}}"

    def places(self, root: str) -> list[str]:
        """Name every leaf as Python would reach it from `root`: `kwargs['mask'][1]`, `target.labels`."""
        if self.container is object:
            return [root]
        steps = self._steps(root)
        return [place for step, child in zip(steps, self.children, strict=True) for place in child.places(step)]

    def spread(self, marks: Any, is_mark: Callable[[Any], bool], root: str) -> list[Any]:
        """Return one mark or None per leaf, from a tree of marks that may stop early.

        A mark holds for every leaf below its place, None leaves the default. A dict names some children (keys,
        positions or fields), a tuple or list all of them.

        Raises:
            PipelineError: the marks name a child that the tree lacks, or are no marks.
        """
        if marks is None or is_mark(marks):
            return [marks] * self.num_leaves
        if self.container is NoneType:
            return []
        children = zip(self._steps(root), self.children, self._marks_of_children(marks, root), strict=True)
        return [mark for step, child, below in children for mark in child.spread(below, is_mark, step)]

    @property
    def has_fields(self) -> bool:
        """Whether the children are fields of a class, not entries of a tuple, list or dict."""
        return self.container not in PLAIN.values() and field_names(self.container) is not None

    def _steps(self, root: str) -> list[str]:
        return [f"{root}.{name}" if self.has_fields else f"{root}[{name!r}]" for name in self.names]

    def _marks_of_children(self, marks: Any, root: str) -> Sequence[Any]:
        is_branch = self.container is not object
        if isinstance(marks, dict) and is_branch:
            for name in marks:
                if name not in self.names:
                    guess = nearest(str(name), map(str, self.names))
                    raise PipelineError(
                        f"{root}: the spec names {name!r}, but the value has only {list(self.names)}.{guess} "
                        "Drop it from the spec, or pass None as its value"
                    )
            return [marks.get(name) for name in self.names]
        is_sequence = isinstance(marks, (tuple, list)) and not issubclass(self.container, (dict, UserDict))
        if is_sequence and is_branch and len(marks) == len(self.children):
            return list(marks)
        raise PipelineError(
            f"{root}: the spec {marks!r} does not fit a value of the form {self.to_text()}; "
            "expected a marker, None, or a dict, tuple or list of the same form"
        )


LEAF = TreeSpec(object, num_leaves=1)
NONE = TreeSpec(NoneType)


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """Take a tree apart into its leaves, left to right, and its shape."""
    if isinstance(value, Tensor):
        return [value], LEAF
    leaves: list[Any] = []
    return leaves, _collect(value, leaves)


def map_leaves(fn: Callable[[Any], Any], value: Any) -> Any:
    """Return the tree with every leaf replaced by `fn(leaf)`."""
    if isinstance(value, Tensor):
        return fn(value)
    leaves, spec = flatten(value)
    return spec.unflatten([fn(leaf) for leaf in leaves])


def detached(value: Any) -> Any:
    """Return a tree of the same values without their graph."""
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


def as_graph_leaves(value: Any) -> Any:
    """Return the same values as leaves of a graph of their own, asking for a gradient where the original has one."""
    return map_leaves(
        lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf, value
    )


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a tree, in order."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def needing_gradient(value: Any) -> list[Tensor]:
    """Return the tensors of a tree that need a gradient, in order."""
    return [tensor for tensor in tensors_of(value) if tensor.requires_grad]


def _collect(value: Any, leaves: list[Any]) -> TreeSpec:
    if value is None:
        return NONE
    if isinstance(value, Tensor) or type(value) in CONSTANTS:
        leaves.append(value)
        return LEAF
    num_before = len(leaves)
    branch = _children(value)
    if branch is None:
        return _collect_other(value, leaves)
    names, values = branch
    children = tuple(_collect(child, leaves) for child in values)
    context = _derived_fields(value) if is_dataclass(value) else None
    return TreeSpec(type(value), names, children, len(leaves) - num_before, context)


def _collect_other(value: Any, leaves: list[Any]) -> TreeSpec:
    """Collect from a registered class or a mapping; anything else is a leaf, and so is one that holds only constants.

    A configuration is often such a mapping, and so are statistics that layers write: it stays the object that it is.
    """
    registered = None if is_block_mask(value) else registered_children(value)
    entries = _entries(value)
    inner: list[Any] = []
    values = list(entries.values()) if registered is None else registered[0]
    children = tuple(_collect(child, inner) for child in values)
    if all(map(_is_constant, inner)):
        leaves.append(value)
        return LEAF
    leaves += inner
    is_keyed = list(map(id, values)) == list(map(id, entries.values()))
    names = tuple(entries) if is_keyed else tuple(range(len(values)))
    context = _constants_of(value, entries) if registered is None else registered[1]
    return TreeSpec(type(value), names, children, len(inner), context)


def _entries(value: Any) -> dict[Name, Any]:
    """Return the entries of a mapping; of any other object, and of a mapping with keys of other types, none."""
    is_mapping = isinstance(value, (dict, UserDict)) and all(type(key) in (str, int) for key in value)
    return dict(value.items()) if is_mapping else {}


def _constants_of(value: Any, entries: dict[Name, Any]) -> dict[str, Any]:
    """Return the attributes of a mapping that its constructor does not make of its entries, such as a scale set later.

    Others may be counted from the entries, as a number of rows is: those of a part are its own, and so is a property
    that the mapping has cached.
    """
    if not hasattr(value, "__dict__"):
        return {}
    container = type(value)
    new_items = vars(_constructed(container, entries))
    items = {name: item for name, item in vars(value).items() if isinstance(item, CONSTANTS) and name not in entries}
    cached = {name for name in items if isinstance(getattr(container, name, None), cached_property)}
    return {name: item for name, item in items.items() if name not in cached and new_items.get(name, _MISSING) != item}


def _is_constant(leaf: Any) -> bool:
    """Whether a leaf is the same for all microbatches; a tensor without dimensions is never cut."""
    return isinstance(leaf, CONSTANTS) or (isinstance(leaf, Tensor) and not leaf.dim())


def _children(value: Any) -> tuple[tuple[Name, ...], Iterable[Any]] | None:
    """Return the names of a branch's children, and the children; None for a leaf."""
    container = type(value)
    if container is tuple or container is list:
        return tuple(range(len(value))), value
    if container is dict or container is OrderedDict:
        for key in value:
            if type(key) is not str and type(key) is not int:
                raise PipelineError(
                    f"a dict of the batch or of a stage's output has the key {key!r} of type {type(key).__name__}; "
                    "expected str or int keys. Rename the key, or pass the values in a tuple or dataclass"
                )
        return tuple(value), value.values()
    names = field_names(container)
    return None if names is None else (names, [getattr(value, name) for name in names])


def field_names(container: type) -> tuple[str, ...] | None:
    """Return the field names of a named tuple's or dataclass's class, or None for any other class."""
    if is_dataclass(container):
        return tuple(item.name for item in fields(container))
    if issubclass(container, tuple) and hasattr(container, "_fields"):
        return tuple(container._fields)
    return None


def _build(spec: TreeSpec, leaves: Iterator[Any]) -> Any:
    container: Any = spec.container
    if container is object:
        return next(leaves)
    if container is NoneType:
        return None
    values = [_build(child, leaves) for child in spec.children]
    if container is list or container is tuple:
        return container(values)
    if container is dict or container is OrderedDict:
        return container(zip(spec.names, values, strict=True))
    if not spec.has_fields:
        return _build_other(spec, values)
    if not is_dataclass(container):
        return container._make(values)
    return _build_dataclass(container, spec.names, values, spec.context or frozenset())


def _build_other(spec: TreeSpec, values: Sequence[Any]) -> Any:
    container: Any = spec.container
    if not isinstance(spec.context, dict):
        return rebuilt_registered(values, spec.context)
    mapping = _constructed(container, dict(zip(spec.names, values, strict=True)))
    if spec.context:
        vars(mapping).update(spec.context)
    return mapping


def _derived_fields(value: Any) -> frozenset[Name]:
    """Return the fields that a dataclass makes of its fields as they are now, such as a number of rows.

    Only numbers and texts are told so. One that was changed later, or that the class would change once more, as
    `self.rate = rate / 100` does, is not what the class makes of the fields.
    """
    container: Any = type(value)
    names = [item.name for item in fields(value) if isinstance(getattr(value, item.name, _MISSING), CONSTANTS)]
    if not names or not _takes_fields(container):
        return frozenset()
    arguments = {item.name: getattr(value, item.name) for item in fields(value) if item.init}
    try:
        instance = container(**arguments)
    except Exception:  # a class that refuses the fields of a microbatch too says so when it is built
        return frozenset()
    return frozenset(name for name in names if getattr(instance, name, _MISSING) == getattr(value, name))


def _build_dataclass(container: Any, names: Sequence[Any], values: Sequence[Any], derived: frozenset[Name]) -> Any:
    value_by_name = dict(zip(names, values, strict=True))
    arguments = {item.name: value_by_name[item.name] for item in fields(container) if item.init}
    is_constructed = _takes_fields(container)
    instance = _constructed(container, **arguments) if is_constructed else object.__new__(container)
    for name, value in value_by_name.items():
        # `__post_init__` may have changed a value once more, as by a scale. A number that it counts anew is right.
        is_new = is_constructed and name in derived and isinstance(value, CONSTANTS)
        if not is_new and getattr(instance, name, _MISSING) is not value:
            object.__setattr__(instance, name, value)  # the dataclass may be frozen
    return instance


_MISSING = object()


@cache
def _takes_fields(container: type) -> bool:
    """Whether a dataclass is built from its fields alone: not with an `InitVar`, or a constructor of another form."""
    try:
        signature(container).bind(**{item.name: None for item in fields(cast(Any, container)) if item.init})
    except (TypeError, ValueError):
        return False
    return True


def _constructed(container: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return container(*args, **kwargs)
    except Exception as error:
        raise PipelineError(
            f"a {container.__module__}.{container.__qualname__} cannot be rebuilt by its class from its entries "
            f"({type(error).__name__}: {error}). Let its constructor take those of a microbatch, or pass them in a "
            "plain dict or tuple"
        ) from error
