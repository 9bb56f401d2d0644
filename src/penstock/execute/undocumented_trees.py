"""Torch's pytrees, which its docs do not promise: the classes that a user or a library has registered as containers."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

_PYTREE = attrgetter("utils._pytree")(torch)


def registered_children(value: Any) -> tuple[list[Any], Any] | None:
    """Return the children of a registered container and torch's spec of it; None for any other object."""
    if _PYTREE.tree_is_leaf(value):
        return None
    children, spec = _PYTREE.tree_flatten(value, is_leaf=lambda inner: inner is not value)
    return children, spec


def rebuilt_registered(children: Sequence[Any], spec: Any) -> Any:
    """Return a container with other children, by the spec that `registered_children` gave."""
    return _PYTREE.tree_unflatten(children, spec)
