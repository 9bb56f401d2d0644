"""Objects that hold tensors where no cut reaches them: rows of the batch in one are looked for, so that it is refused.

Nothing of the object is run: not its methods or properties, nor the methods of a class that calls itself a mapping.
"""

import inspect
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from types import FunctionType, MappingProxyType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.execute.values.tree import CONSTANTS

_MAX_DEPTH = 4
_MAX_OBJECTS = 1000
"""Limits of the search: what is deeper, or comes later, is not looked at, so that a step does not take longer."""
_NO_ROWS = (nn.Module, nn.Parameter, DeviceMesh, ModuleType, type, *CONSTANTS)
"""Objects without tensors, or whose tensors belong to a model, to the ranks or to a library, and never to a batch."""


def rows_within(value: Any, dim: int) -> dict[int, str]:
    """Return the lengths along `dim` of the tensors and arrays within a value, with the way to the nearest of each.

    A way is a text such as `.mask` or `[0].mask`; it is empty where the value is itself an array.
    """
    ways: dict[int, str] = {}
    queue: deque[tuple[str, Any, int]] = deque([("", value, 0)])
    visited: set[int] = set()
    while queue and len(visited) < _MAX_OBJECTS:
        way, item, depth = queue.popleft()
        if isinstance(item, _NO_ROWS):
            continue
        if isinstance(item, (Tensor, np.ndarray)):
            if -item.ndim <= dim < item.ndim:
                # By `size`, since some nested tensors have no shape.
                ways.setdefault(item.size(dim) if isinstance(item, Tensor) else item.shape[dim], way)
        elif depth < _MAX_DEPTH and id(item) not in visited:
            visited.add(id(item))
            queue.extend((way + step, inner, depth + 1) for step, inner in islice(_inner_objects(item), _MAX_OBJECTS))
    return ways


def _inner_objects(value: Any) -> Iterator[tuple[str, Any]]:
    """Name the objects that a value holds: entries, attributes, and what a function reads besides its arguments."""
    if isinstance(value, (dict, MappingProxyType)):
        yield from ((f"[{key!r}]", item) for key, item in list(islice(value.items(), _MAX_OBJECTS)))
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, FunctionType):
        yield from _objects_read_by(value)
    elif isinstance(value, MethodType):
        yield from ((".__self__", value.__self__), ("", value.__func__))
    elif isinstance(value, partial):
        yield from ((".args", value.args), (".keywords", value.keywords), (".func", value.func))
    yield from ((f".{name}", item) for name, item in _attributes(value))


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Return the attributes and slots of an object, past any `__getattr__` of its class."""
    attributes: list[tuple[str, Any]] = []
    with suppress(AttributeError):
        attributes += islice(object.__getattribute__(value, "__dict__").items(), _MAX_OBJECTS)
    classes = [vars(container) for container in type(value).__mro__ if "__slots__" in vars(container)]
    for name, member in chain.from_iterable(members.items() for members in classes):
        if isinstance(member, MemberDescriptorType):
            with suppress(AttributeError):  # a slot that is empty
                attributes.append((name, member.__get__(value)))
    return attributes


def _objects_read_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Name what a function closes over, and the tensors of its module that it reads."""
    try:
        variables = inspect.getclosurevars(function)
    except ValueError:  # a variable that has no value yet
        return
    yield from ((f" reading {name}", item) for name, item in variables.nonlocals.items())
    # Of the module only tensors: through other functions and objects there the search would come to whole libraries.
    tensors = ((name, item) for name, item in variables.globals.items() if isinstance(item, (Tensor, np.ndarray)))
    yield from ((f" reading {name}", item) for name, item in tensors)
