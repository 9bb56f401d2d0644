"""Finds the tensors that are held between I and W besides those that the parts of a backward keep themselves.

graphs     the nodes from a product to its parameters have saved tensors, such as those of a parametrization
functions  that layers leave for W hold tensors in their closures, or take them from a queue of the layer
"""

import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from penstock.execute.parameters.gradient_store import WeightEntry
from penstock.execute.split.own_weight_gradients import Closure, OwnEntry, OwnWeightGradients
from penstock.execute.undocumented import LEAF, kind_of, saved_tensors

_NOT_ENTERED = (type, ModuleType, CodeType, FrameType)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that say nothing of a layer's queue, parameters and buffers among them."""


@dataclass(slots=True)
class Reached:
    """The tensors that something holds or leads to, and the layers that it is of."""

    tensors: list[Tensor] = field(default_factory=list)
    """Without parameters."""
    owners: list[nn.Module | Tensor] = field(default_factory=list)
    """Modules, which are not entered, and parameters."""


def held_by(entry: WeightEntry) -> Reached:
    """Return what is held for one of the entries of a W once I has run."""
    if isinstance(entry, OwnEntry):
        return reached_by(entry.run)
    return Reached([*entry.kept, *saved_behind(entry.roots)], [*entry.parameters])


def saved_behind(roots: Sequence[GradientEdge]) -> list[Tensor]:
    """Return what the nodes from some edges to parameters have saved, parameters apart."""
    nodes = nodes_behind([root.node for root in roots], set())
    saved = [each for node in nodes if kind_of(node) != LEAF for each in saved_tensors(node)]
    return [each for each in saved if not isinstance(each, nn.Parameter)]


def nodes_behind(nodes: Iterable[Node | None], seen: set[Node]) -> Iterator[Node]:
    """Walk from some nodes of a graph to its leaves; those in `seen` are done."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


def reached_by(closure: Closure) -> Reached:
    """Return what a function that waits for W leads to."""
    if isinstance(closure, partial) and isinstance(getattr(closure.func, "__self__", None), OwnWeightGradients):
        (layer,) = closure.args  # from whose queue it takes an entry
        return Reached(queued([layer]), [layer])
    return _reached([closure])


def queued(layers: Iterable[nn.Module]) -> list[Tensor]:
    """Return the tensors that attributes of some layers lead to, their queues among them."""
    own = [vars(module) for layer in layers for module in layer.modules()]
    values = [value for each in own for name, value in each.items() if name not in _OF_EVERY_MODULE]
    return _reached(values).tensors


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
