"""Layouts: a tree without its tensors' values, which two ranks agree on once and then hold every message to.

A layout travels between ranks as JSON, never as pickle, and names only classes that the receiving process has already
imported. Scalars among the leaves may change at any message: their places and types are agreed on as shapes are,
and their values travel beside the tensors. Text, and an integer beyond 64 bits, is part of the agreement.
"""

import json
import struct
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PipelineError
from penstock.execute.values.tensors import Order, is_order, kind_that_cannot_travel, memory_order
from penstock.execute.values.tree import LEAF, NONE, PLAIN, Name, TreeSpec, field_names, flatten

Scalar = bool | int | float | str

_CODES: dict[type, str] = {bool: "?", int: "q", float: "d"}
_LIMIT = 2**63
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
"""Types of elements, by the names under which they travel."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """All that two ranks must agree on about one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    order: Order = field(default=(), compare=False)
    """Order of the dimensions in memory; empty where it is that of `shape`. A sender brings a tensor into it."""

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorInfo":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, memory_order(tensor))

    def __str__(self) -> str:
        need = " that needs a gradient" if self.requires_grad else ""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{need}"


@dataclass(frozen=True)
class Layout:
    """A tree in which each tensor is replaced by its `TensorInfo`; other leaves are plain values.

    The properties that every message asks for are worked out once. Python calls 1, 1.0 and True equal, so compare two
    layouts by what `encode_layout` returns.
    """

    spec: TreeSpec
    leaves: tuple[TensorInfo | Scalar, ...]

    def __str__(self) -> str:
        leaves = [str(leaf) if isinstance(leaf, TensorInfo) else repr(leaf) for leaf in self.leaves]
        return f"{self.spec.to_text()} with {', '.join(leaves)}"

    @cached_property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorInfo))

    @cached_property
    def needing_gradient(self) -> tuple[TensorInfo, ...]:
        return tuple(info for info in self.tensors if info.requires_grad)

    @cached_property
    def only_tensor(self) -> TensorInfo | None:
        """The tensor of a tree that is one tensor; None of other trees."""
        return self.tensors[0] if self.spec == LEAF and self.tensors else None

    @cached_property
    def has_orders(self) -> bool:
        """Whether a tensor lies in memory in an order other than that of its shape."""
        return any(info.order for info in self.tensors)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Indices of the leaves that may have other values in each message."""
        return tuple(index for index, leaf in enumerate(self.leaves) if is_number(leaf))

    @cached_property
    def _format_of_numbers(self) -> struct.Struct:
        return struct.Struct("<" + "".join(_CODES[type(self.leaves[index])] for index in self.numbers))

    @property
    def bytes_of_numbers(self) -> int:
        return self._format_of_numbers.size

    def written_numbers(self, leaves: Sequence[Any]) -> Tensor:
        """Return the numbers among a tree's leaves as a tensor of bytes."""
        packed = self._format_of_numbers.pack(*(leaves[index] for index in self.numbers))
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def with_numbers(self, packed: Tensor) -> "Layout":
        """Return the layout with the numbers that `written_numbers` has packed."""
        numbers = self._format_of_numbers.unpack(packed.cpu().numpy().tobytes())
        number_by_index = dict(zip(self.numbers, numbers, strict=True))
        return Layout(self.spec, tuple(number_by_index.get(index, leaf) for index, leaf in enumerate(self.leaves)))

    @property
    def num_bytes(self) -> int:
        return sum(prod(info.shape) * info.dtype.itemsize for info in self.tensors)

    def fits_tensor(self, value: Any) -> bool:
        """Whether a value is the one tensor of this layout; False says nothing of other trees."""
        expected = self.only_tensor
        return (
            expected is not None
            and isinstance(value, Tensor)
            and value.shape == expected.shape
            and value.dtype is expected.dtype
            and value.requires_grad is expected.requires_grad
        )

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """Build the tree with these tensors, one for each `TensorInfo`, in order."""
        if len(tensors) != len(self.tensors):
            raise PipelineError(
                f"layout {self.spec.to_text()}: got {len(tensors)} tensors, expected {len(self.tensors)}; "
                "pass one tensor for each TensorInfo"
            )
        remaining = iter(tensors)
        return self.spec.unflatten([next(remaining) if isinstance(leaf, TensorInfo) else leaf for leaf in self.leaves])


def leaf_text(leaf: Any, *, with_order: bool = False) -> str:
    """Say what a leaf is; equal texts mean equal shapes on every stage, and `with_order` equal memory formats.

    The values of numbers may change freely; those of booleans and texts often decide what a layer returns.
    """
    if isinstance(leaf, Tensor):
        info = TensorInfo.of(leaf)
        return f"{info} in the order {info.order}" if with_order and info.order else str(info)
    if type(leaf) is bool or (type(leaf) in (int, str) and not is_number(leaf)):
        return repr(leaf)
    return f"{type(leaf).__module__}.{type(leaf).__qualname__}".removeprefix("builtins.")


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
        require_plain(leaf, place)
        info = TensorInfo.of(leaf)
        return [info.shape, str(info.dtype).removeprefix("torch."), info.requires_grad, info.order]
    if type(leaf) is float:
        return {"float": leaf.hex()}  # exact, and JSON has no nan
    if type(leaf) not in (int, bool, str):
        raise _cannot_travel(place, type(leaf))
    return leaf


def require_plain(tensor: Tensor, place: str) -> None:
    """Make sure that another rank can rebuild a tensor from its values, shape and type.

    Raises:
        PipelineError: naming what it is, and the way out.
    """
    if kind := kind_that_cannot_travel(tensor):
        raise PipelineError(
            f"{place} is {kind}, which would not be one on another rank; expected a plain dense tensor: pass its "
            "parts, or let the stage's last layer make a plain one, as by as_subclass(torch.Tensor), to_dense() or "
            "dequantize()"
        )


def _cannot_travel(place: str, kind: type) -> PipelineError:
    return PipelineError(
        f"{place} is a {kind.__module__}.{kind.__qualname__}, which cannot travel between ranks; "
        "expected tensors, int, float, bool, str or None in tuples, lists, dicts, named tuples or dataclasses. "
        "Take it apart into these, or build it inside the stage that needs it"
    )


def _leaf_from_json(encoded: Any) -> TensorInfo | Scalar:
    match encoded:
        case bool() | int() | str():
            return encoded
        case {"float": str(text)}:
            return float.fromhex(text)
        case [[*shape], str(name), bool(requires_grad), [*order]] if all(type(n) is int and n >= 0 for n in shape):
            if name in _DTYPES and is_order(order, len(shape)):
                return TensorInfo(tuple(shape), _DTYPES[name], requires_grad, tuple(order))
    raise ValueError(f"unknown leaf {encoded!r}")


def _spec_to_json(spec: TreeSpec) -> object:
    if spec.container is object:
        return "*"
    if spec.container is NoneType:
        return None
    if spec.container not in PLAIN.values() and not spec.has_fields:
        raise _cannot_travel("a part of the output", spec.container)
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
            container = PLAIN[kind] if kind in PLAIN else _imported_class(kind)
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
    return names == field_names(container)


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
    if imported is None or field_names(imported) is None:
        raise PipelineError(
            f"a peer sent a value of the class {path}, which is no dataclass or named tuple among the modules that "
            "this rank has imported; import its module on every rank"
        )
    return imported


def _find_class(path: str) -> type | None:
    """Look a class up among the imported modules, through plain dictionaries only, so that no code can run."""
    module, _, qualname = path.partition(":")
    # Not getattr, nor an import: a module's `__getattr__` or a descriptor would run code that a peer has named.
    holder: Any = sys.modules.get(module)
    for part in qualname.split("."):
        if not isinstance(holder, type(sys)) and not isinstance(holder, type):
            return None
        holder = vars(holder).get(part)
    return holder if isinstance(holder, type) else None


def is_number(leaf: object) -> bool:
    """Whether a leaf is a scalar that may change at any message."""
    return type(leaf) in (bool, float) or (type(leaf) is int and -_LIMIT <= leaf < _LIMIT)


def is_alike(layout: Layout, agreed: Layout) -> bool:
    """Whether a tree fits what was agreed on: all but the values of numbers, NaN among them, is equal.

    A value that cannot travel, and so stays on its rank, counts by its class alone.
    """
    if layout.spec != agreed.spec:
        return False
    return all(_fits(*pair) for pair in zip(layout.leaves, agreed.leaves, strict=True))


def _fits(leaf: object, agreed: object) -> bool:
    if isinstance(agreed, TensorInfo):
        return leaf == agreed
    if type(leaf) is not type(agreed):
        return False
    if type(leaf) not in (int, str):
        return True
    return (is_number(leaf) and is_number(agreed)) or leaf == agreed
