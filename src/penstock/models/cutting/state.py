"""Fingerprints of values and modules: what a forward changes besides the tensors that it returns is found by them."""

import random
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.models.cutting.part_state import PartState
from penstock.models.cutting.undocumented import own_tensors_of, plain_attributes_of, version_of

ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum, type)
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, ModuleType)
EXACT_ATOMS = frozenset((bool, int, str, type(None)))
"""Types of most values, which are their own fingerprints."""
PLAIN_DICTS = (dict, OrderedDict)
MOST_LEVELS = 4
"""How deep objects are looked into."""


def fingerprint(value: Any, levels: int = MOST_LEVELS, known: dict[int, Any] | None = None) -> Any:
    """Return something that is equal before and after, unless a value was changed or replaced.

    Tensors count by identity and number of changes in place, containers by what they hold, objects by their
    attributes, a `PartState` by what all parts know of it. `known` has the objects that were met.
    """
    kind = type(value)
    if kind in EXACT_ATOMS:
        return value
    if kind in FUNCTIONS:
        return id(value)
    if isinstance(value, float):
        return repr(value)  # so that NaN is equal to itself
    if isinstance(value, ATOMS):
        return value if value.__hash__ is not None else repr(value)
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if isinstance(value, (nn.Module, *FUNCTIONS)):
        return id(value)
    if isinstance(value, PartState):
        return id(value), value.common
    known = {} if known is None else known
    if id(value) in known:
        return known[id(value)]
    known[id(value)] = id(value)  # while it is looked at: it may hold itself
    known[id(value)] = found = _of_object(value, levels, known)
    return found


def _of_object(value: Any, levels: int, known: dict[int, Any]) -> Any:
    if isinstance(value, dict):
        items = tuple([(_key(key), fingerprint(item, levels, known)) for key, item in value.items()])
        return type(value), items, () if type(value) in PLAIN_DICTS else _attributes(value, levels, known)
    if isinstance(value, list | tuple | deque):
        return type(value), tuple([fingerprint(item, levels, known) for item in value])
    if isinstance(value, set | frozenset):
        return frozenset(map(_key, value))
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if levels and hasattr(value, "__dict__"):
        return id(value), _attributes(value, levels, known)
    has_text = getattr(type(value), "__repr__", None) is not getattr(object, "__repr__", None)
    return id(value), repr(value) if has_text else None


def _attributes(value: Any, levels: int, known: dict[int, Any]) -> Any:
    attributes: Mapping[str, Any] = getattr(value, "__dict__", {})
    return tuple((name, fingerprint(item, levels - 1, known)) for name, item in attributes.items())


def _key(key: Any) -> Any:
    return key if isinstance(key, ATOMS) else id(key)


def module_state(
    modules: Iterable[tuple[str, nn.Module]], saved_names: frozenset[str], hidden: frozenset[int] = frozenset()
) -> dict[str, Any]:
    """Return the fingerprint of each attribute of modules, by full name.

    `saved_names` are the parameters and buffers that a part holds, and `hidden` the ids of submodules that stages run.
    """
    known: dict[int, Any] = {}
    fingerprints: dict[str, Any] = {}
    for path, module in modules:
        prefix = f"{path}." if path else ""
        attributes = plain_attributes_of(module) | own_tensors_of(module)[1]
        for name, value in attributes.items():
            is_empty = type(value) in PLAIN_DICTS and not value  # as most dicts of hooks are
            if value is not None and not is_empty and prefix + name not in saved_names:
                fingerprints[prefix + name] = fingerprint(value, known=known)
        children = tuple((name, id(child)) for name, child in module.named_children() if id(child) not in hidden)
        fingerprints[f"{prefix}submodules"] = children
    return fingerprints


def changed_names(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the full names of attributes that are new, gone or of another fingerprint."""
    names = dict.fromkeys((*before, *after))
    return [name for name in names if before.get(name) != after.get(name)]
