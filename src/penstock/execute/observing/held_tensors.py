"""Finds the tensors that are held between I and W besides those that the parts of a backward keep themselves.

graphs     the nodes from a product to its parameters have saved tensors, such as those of a parametrization
functions  that layers leave for W hold tensors in their closures, or take them from a queue of the layer
"""

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from penstock.execute.batch.input_graphs import nodes_behind
from penstock.execute.parameters.gradient_store import WeightEntry
from penstock.execute.split.own_weight_gradients import Closure, OwnEntry, OwnWeightGradients
from penstock.execute.undocumented import LEAF, kind_of, saved_tensors

_NOT_ENTERED = (type, ModuleType, CodeType, FrameType)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that say nothing of a layer's queue, parameters and buffers among them."""


@dataclass(slots=True)
class Reached:
    """The tensors that an entry of a W holds or leads to, and the layers that the entry belongs to."""

    tensors: list[Tensor] = field(default_factory=list)
    """The tensors that are no parameters."""
    owners: list[nn.Module | Tensor] = field(default_factory=list)
    """The modules, whose attributes are not followed, and the parameters that were met on the way."""


def held_by(entry: WeightEntry) -> Reached:
    """Return what is held for one of the entries of a W once I has run."""
    if isinstance(entry, OwnEntry):
        return reached_by(entry.run)
    nodes = [node for node in nodes_behind([root.node for root in entry.roots], set()) if kind_of(node) != LEAF]
    saved = [tensor for node in nodes for tensor in saved_tensors(node) if not isinstance(tensor, nn.Parameter)]
    return Reached([*entry.held_tensors, *saved], [*entry.parameters])


def reached_by(closure: Closure) -> Reached:
    """Return the tensors and layers that a function which waits for W leads to."""
    if isinstance(closure, partial) and isinstance(getattr(closure.func, "__self__", None), OwnWeightGradients):
        (layer,) = closure.args  # from whose queue it takes an entry
        return Reached(queued([layer]), [layer])
    return _reached([closure])


def queued(layers: Iterable[nn.Module]) -> list[Tensor]:
    """Return the tensors that attributes of some layers lead to, their queues among them."""
    module_attributes = [vars(module) for layer in layers for module in layer.modules()]
    values = [
        value for attributes in module_attributes for name, value in attributes.items() if name not in _OF_EVERY_MODULE
    ]
    return _reached(values).tensors


def _reached(roots: Sequence[Any]) -> Reached:
    """Follow the references of Python objects from some roots, and return the tensors and owners on the way."""
    reached = Reached()
    visited_ids: set[int] = set()
    pending_values = list(roots)
    while pending_values:
        value = pending_values.pop()
        if id(value) in visited_ids:
            continue
        visited_ids.add(id(value))
        if isinstance(value, nn.Module | nn.Parameter):
            reached.owners.append(value)
        elif isinstance(value, Tensor):
            reached.tensors.append(value)
        elif isinstance(value, Node):  # of a function in Python, whose saved tensors are gone
            pending_values.append(getattr(value, "__dict__", None))
        elif isinstance(value, FunctionType):  # but not its globals
            pending_values += [value.__closure__, value.__defaults__, value.__kwdefaults__]
        elif not isinstance(value, _NOT_ENTERED):
            pending_values += gc.get_referents(value)
    return reached
