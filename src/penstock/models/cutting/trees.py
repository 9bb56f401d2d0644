"""Trees of values that a forward hands to a submodule, or gets from it: tuples, lists, dicts and dataclasses."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PLAIN_TYPES = frozenset((Tensor, type(None), bool, int, float, str, torch.dtype, torch.device))
"""Types of most items; whether a value is of one is asked first, since a forward asks for thousands of values."""


def map_items(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a tree like `value` with `function` of each item that is no container; containers are made anew."""
    if type(value) in PLAIN_TYPES or isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_items(function, item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_items(function, item) for item in value)
    if isinstance(value, dict):
        mapping = copy.copy(value)  # a subclass keeps what it has beside its items
        for key, item in value.items():
            mapping[key] = map_items(function, item)
        return mapping
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        record = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(record, field.name, map_items(function, object.__getattribute__(value, field.name)))
        return record
    return function(value)


def items_in(value: Any) -> list[Any]:
    """Return the items of a tree that are no containers, in the order of `map_items`."""
    items: list[Any] = []
    _collect(value, items)
    return items


def _collect(value: Any, items: list[Any]) -> None:
    if type(value) in PLAIN_TYPES:
        items.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, items)
    elif isinstance(value, Tensor):
        items.append(value)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, items)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            # Configs of transformers refuse attributes that differ from layer to layer where they are asked for them.
            _collect(object.__getattribute__(value, field.name), items)
    else:
        items.append(value)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return a tree like `value` with `function` of each of its tensors."""
    return map_items(lambda item: function(item) if isinstance(item, Tensor) else item, value)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a tree."""
    return [item for item in items_in(value) if isinstance(item, Tensor)]
