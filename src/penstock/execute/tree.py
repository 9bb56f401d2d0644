"""Trees of values: what crosses a stage boundary or makes up a batch, taken apart into leaves and put together again.

Tuples, lists, dicts (keys `str` or `int`, order kept), named tuples, dataclass instances and None are branches; every
other object is a leaf. A `Layout` is a tree without its tensors' values; it travels between ranks as JSON, never as
pickle, and names only classes that the receiving process has already imported.
"""

import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from math import prod
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PipelineError, nearest
from penstock.execute.memory_order import Order, is_order, memory_order

Name = int | str
Scalar = bool | int | float | str

_PLAIN: dict[str, type] = {"tuple": tuple, "list": list, "dict": dict, "OrderedDict": OrderedDict}


@dataclass(frozen=True, slots=True)
class TreeSpec:
    """The shape of a tree: `container` is the branch's class, `object` for a leaf and `NoneType` for None.

    `names` are keys, positions or field names, one per child. Equal specs put equal leaves together to equal trees.
    """

    container: type
    names: tuple[Name, ...] = ()
    children: tuple["TreeSpec", ...] = ()
    num_leaves: int = field(default=0, compare=False)

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Put the leaves, in the order of `flatten`, back into a tree; a dataclass is built by its constructor."""
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
        return f"{'OrderedDict' * (self.container is OrderedDict)}{{{', '.join(pairs)}}}"

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
        return self.container not in _PLAIN.values()

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
        is_sequence = isinstance(marks, (tuple, list)) and not issubclass(self.container, dict)
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


def _collect(value: Any, leaves: list[Any]) -> TreeSpec:
    if value is None:
        return NONE
    names = _child_names(value)
    if names is None:
        leaves.append(value)
        return LEAF
    before = len(leaves)
    children = tuple(_collect(child, leaves) for child in _child_values(value, names))
    return TreeSpec(type(value), names, children, len(leaves) - before)


def _child_names(value: Any) -> tuple[Name, ...] | None:
    """Return the names of a branch's children, or None for a leaf."""
    container = type(value)
    if isinstance(value, Tensor):
        return None
    if container is tuple or container is list:
        return tuple(range(len(value)))
    if container is dict or container is OrderedDict:
        return _dict_names(value)
    return _field_names(container)


def _child_values(value: Any, names: tuple[Name, ...]) -> Iterable[Any]:
    if isinstance(value, (tuple, list)):
        return value
    if type(value) is dict or type(value) is OrderedDict:
        values: Iterable[Any] = value.values()
        return values
    return [getattr(value, str(name)) for name in names]


def _dict_names(value: dict[Any, Any]) -> tuple[Name, ...]:
    for key in value:
        if type(key) is not str and type(key) is not int:
            raise PipelineError(
                f"a dict of the batch or of a stage's output has the key {key!r} of type {type(key).__name__}; "
                "expected str or int keys. Rename the key, or pass the values in a tuple or dataclass"
            )
    return tuple(value)


def _field_names(container: type) -> tuple[str, ...] | None:
    """Return the field names of a named tuple's or dataclass's class, or None for any other class."""
    if is_dataclass(container):
        return tuple(item.name for item in fields(container))
    if issubclass(container, tuple) and hasattr(container, "_fields"):
        return tuple(container._fields)
    return None


def _build(spec: TreeSpec, leaves: Iterator[Any]) -> Any:
    if spec.container is object:
        return next(leaves)
    if spec.container is NoneType:
        return None
    values = [_build(child, leaves) for child in spec.children]
    if spec.container is list or spec.container is tuple:
        return spec.container(values)
    if is_dataclass(spec.container):
        return _build_dataclass(spec.container, dict(zip(map(str, spec.names), values, strict=True)))
    if issubclass(spec.container, dict):
        return spec.container(zip(spec.names, values, strict=True))
    container: Any = spec.container
    return container._make(values)


def _build_dataclass(container: type, named: dict[str, Any]) -> Any:
    late = [item.name for item in fields(container) if not item.init]
    instance = container(**{name: value for name, value in named.items() if name not in late})
    for name in late:
        object.__setattr__(instance, name, named[name])  # the dataclass may be frozen
    return instance


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What two ranks must agree on about one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    order: Order = field(default=(), compare=False)
    """Of its dimensions in memory; empty where it is that of `shape`. A sender brings a tensor into the agreed one."""

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorInfo":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, memory_order(tensor))


@dataclass(frozen=True, slots=True)
class Layout:
    """A tree in which each tensor is replaced by its `TensorInfo`; other leaves are plain values.

    Python calls 1, 1.0 and True equal, so compare two layouts by what `encode_layout` returns.
    """

    spec: TreeSpec
    leaves: tuple[TensorInfo | Scalar, ...]

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorInfo))

    @property
    def has_orders(self) -> bool:
        """Whether a tensor lies in memory in an order other than that of its shape."""
        return any(info.order for info in self.tensors)

    @property
    def num_bytes(self) -> int:
        return sum(prod(info.shape) * info.dtype.itemsize for info in self.tensors)

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """Build the tree with these tensors, one for each `TensorInfo`, in order."""
        if len(tensors) != len(self.tensors):
            raise PipelineError(
                f"layout {self.spec.to_text()}: got {len(tensors)} tensors, expected {len(self.tensors)}; "
                "pass one tensor for each TensorInfo"
            )
        remaining = iter(tensors)
        return self.spec.unflatten([next(remaining) if isinstance(leaf, TensorInfo) else leaf for leaf in self.leaves])


def encode_layout(tree: Any) -> bytes:
    """Write the layout of the tree as JSON, the same bytes for the same layout.

    Raises:
        PipelineError: a leaf, or the class of a branch, is nothing that another rank could rebuild.
    """
    leaves, spec = flatten(tree)
    encoded = [_leaf_to_json(leaf, place) for leaf, place in zip(leaves, spec.places("value"), strict=True)]
    return json.dumps({"tree": _spec_to_json(spec), "leaves": encoded}, separators=(",", ":")).encode()


def decode_layout(data: bytes) -> Layout:
    """Read what `encode_layout` wrote; no code is imported or run for it.

    Raises:
        PipelineError: the bytes are no layout, or name a class that this process has not imported.
    """
    try:
        message = json.loads(data)
        spec = _spec_from_json(message["tree"])
        layout = Layout(spec, tuple(_leaf_from_json(leaf) for leaf in message["leaves"]))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise PipelineError(f"a layout of {len(data)} bytes cannot be read ({error}); {_SAME_VERSION}") from error
    if len(layout.leaves) != spec.num_leaves:
        raise PipelineError(
            f"a layout for {spec.to_text()} has {len(layout.leaves)} leaves, expected {spec.num_leaves}; "
            f"{_SAME_VERSION}"
        )
    return layout


_SAME_VERSION = "run the same version of Penstock and of the model on all ranks"


def _leaf_to_json(leaf: Any, place: str) -> object:
    if isinstance(leaf, Tensor):
        if leaf.layout is not torch.strided:
            raise PipelineError(f"{place} is a tensor of layout {leaf.layout}; expected a dense one: pass its parts")
        info = TensorInfo.of(leaf)
        return [info.shape, str(info.dtype).removeprefix("torch."), info.requires_grad, info.order]
    if type(leaf) is float:
        return {"float": leaf.hex()}  # exact, and JSON has no nan
    if type(leaf) in (int, bool, str):
        scalar: object = leaf
        return scalar
    raise PipelineError(
        f"{place} is a {type(leaf).__module__}.{type(leaf).__qualname__}, which cannot travel between ranks; expected "
        "tensors, int, float, bool, str or None in tuples, lists, dicts, named tuples or dataclasses. "
        "Take it apart into these, or build it inside the stage that needs it"
    )


def _leaf_from_json(encoded: Any) -> TensorInfo | Scalar:
    match encoded:
        case bool() | int() | str():
            return encoded
        case {"float": str(text)}:
            return float.fromhex(text)
        case [[*shape], str(name), bool(requires_grad), [*order]] if all(type(n) is int and n >= 0 for n in shape):
            dtype = getattr(torch, name, None)
            if isinstance(dtype, torch.dtype) and is_order(order, len(shape)):
                return TensorInfo(tuple(shape), dtype, requires_grad, tuple(order))
    raise ValueError(f"unknown leaf {encoded!r}")


def _spec_to_json(spec: TreeSpec) -> object:
    if spec.container is object:
        return "*"
    if spec.container is NoneType:
        return None
    children = [_spec_to_json(child) for child in spec.children]
    kind = spec.container.__name__ if not spec.has_fields else _class_path(spec.container)
    return [kind, spec.names, children]


def _spec_from_json(encoded: Any) -> TreeSpec:
    match encoded:
        case None:
            return NONE
        case "*":
            return LEAF
        case [str(kind), [*names], [*encoded_children]] if len(names) == len(encoded_children):
            container = _PLAIN[kind] if kind in _PLAIN else _imported_class(kind)
            if not _may_have(container, tuple(names)):
                raise ValueError(f"{kind} with the entries {names}")
            children = tuple(map(_spec_from_json, encoded_children))
            return TreeSpec(container, tuple(names), children, sum(child.num_leaves for child in children))
    raise ValueError(f"unknown branch {encoded!r}")


def _may_have(container: type, names: tuple[Name, ...]) -> bool:
    if container is tuple or container is list:
        return names == tuple(range(len(names)))
    if container is dict or container is OrderedDict:
        return all(type(name) in (str, int) for name in names) and len(set(names)) == len(names)
    return names == _field_names(container)


def _class_path(container: type) -> str:
    path = f"{container.__module__}:{container.__qualname__}"
    if _find_class(path) is not container:
        raise PipelineError(
            f"the class {path} cannot be found by its name, so no other rank could rebuild it; "
            "define it at the top level of a module that every rank imports"
        )
    return path


def _imported_class(path: str) -> type:
    imported = _find_class(path)
    if imported is None or _field_names(imported) is None:
        raise PipelineError(
            f"a peer sent a value of the class {path}, which is no dataclass or named tuple among the modules that "
            "this rank has imported; import its module on every rank"
        )
    return imported


def _find_class(path: str) -> type | None:
    """Look a class up among the imported modules, through plain dictionaries only, so that no code can run."""
    module, _, qualname = path.partition(":")
    holder: Any = sys.modules.get(module)
    for part in qualname.split("."):
        if not isinstance(holder, type(sys)) and not isinstance(holder, type):
            return None
        holder = vars(holder).get(part)
    return holder if isinstance(holder, type) else None
