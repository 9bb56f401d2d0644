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
from torch.autograd.graph import GradientEdge, Node

from penstock.execute.parameters.gradient_store import WeightInputs
from penstock.execute.split.own_weight_gradients import Closure, OwnEntry, OwnWeightGradients
from penstock.execute.undocumented import LEAF, kind_of, saved_tensors

_NOT_ENTERED = (type, ModuleType, CodeType, FrameType)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that say nothing of a layer's queue, parameters and buffers among them."""


def held_by(inputs: WeightInputs) -> list[Tensor]:
    """Return all that is held for W once I has run, parameters apart."""
    behind = [each for entry in inputs.entries for each in (*entry.kept, *saved_behind(entry.roots))]
    own = [entry for entry in inputs.entries if isinstance(entry, OwnEntry)]
    return [*behind, *(each for entry in own for each in reached_by(entry.run).tensors)]


def saved_behind(roots: Sequence[GradientEdge]) -> list[Tensor]:
    """Return what the nodes from some edges to parameters have saved, parameters apart."""
    found: list[Tensor] = []
    seen: set[Node] = set()
    waiting: list[Node | None] = [root.node for root in roots]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or kind_of(node) == LEAF:
            continue
        seen.add(node)
        found += [each for each in saved_tensors(node) if not isinstance(each, nn.Parameter)]
        waiting += [following for following, _ in node.next_functions]
    return found


@dataclass(slots=True)
class Reached:
    """The tensors and layers that something leads to by references."""

    tensors: list[Tensor] = field(default_factory=list)
    """Without parameters."""
    owners: list[nn.Module | nn.Parameter] = field(default_factory=list)
    """Modules, which are not entered, and parameters."""


def reached_by(closure: Closure) -> Reached:
    """Return what a function that waits for W leads to."""
    layer = _layer_of_queue(closure)
    if layer is None:
        return _reached([closure])
    found = Reached(queued([layer]))
    found.owners.append(layer)
    return found


def queued(layers: Iterable[nn.Module]) -> list[Tensor]:
    """Return the tensors that attributes of some layers lead to, their queues among them."""
    own = [vars(module) for layer in layers for module in layer.modules()]
    return _reached([value for each in own for name, value in each.items() if name not in _OF_EVERY_MODULE]).tensors


def _layer_of_queue(closure: Closure) -> nn.Module | None:
    """Return the layer from whose queue a function takes an entry; None for other functions."""
    if isinstance(closure, partial) and isinstance(getattr(closure.func, "__self__", None), OwnWeightGradients):
        (layer,) = closure.args
        return layer if isinstance(layer, nn.Module) else None
    return None


def _reached(roots: Sequence[Any]) -> Reached:
    found = Reached()
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module | nn.Parameter):
            found.owners.append(value)
        elif isinstance(value, Tensor):
            found.tensors.append(value)
        elif isinstance(value, Node):  # of a function in Python, whose saved tensors are gone
            waiting.append(getattr(value, "__dict__", None))
        elif isinstance(value, FunctionType):  # but not its globals
            waiting += [value.__closure__, value.__defaults__, value.__kwdefaults__]
        elif not isinstance(value, _NOT_ENTERED):
            waiting += gc.get_referents(value)
    return found
