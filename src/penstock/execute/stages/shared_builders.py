"""Finds parameters that the builders of several layers share, so that they can be tied where they lie on several ranks.

    table = nn.Parameter(...)
    layers = [LayerSpec("in", lambda: Embedding(table)), ..., LayerSpec("out", lambda: Head(table))]

On one rank both layers hold the one `table`. On two ranks each process builds one of them, with a `table` of its own.
A builder that refers to no tensor, module or cache shares nothing. The builders of other ranks' layers that do are
asked, on the meta device, which parameters they would give.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from inspect import getattr_static
from itertools import chain
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from penstock.errors import PartitionError, PenstockError
from penstock.execute.replicas.early import EarlyShards
from penstock.execute.stages.layers import Layer, build_layer
from penstock.execute.stages.names import named_parameters
from penstock.execute.transport.protocol import Transport
from penstock.execute.transport.world import shares_process

Pair = tuple[str, str]
_SHAREABLE = (torch.Tensor, nn.Module, type(lru_cache(lambda: None)))
_MAX_OBJECTS = 10_000
"""Among so many that a builder refers to, a shared one is taken to be."""


@dataclass(frozen=True, slots=True, eq=False)
class BuiltLayers:
    """Those layers of a model that one rank has built."""

    own: Mapping[int, nn.Module]
    """By index."""
    shared: Sequence[Pair]
    """Names of one parameter: that of a layer of this rank, and that of another rank's."""
    seen: Mapping[int, nn.Module]
    """Layers of other ranks that may share something with this rank's, by index."""


Build = Callable[[Layer, str], nn.Module]
"""Builds a layer with this name."""


def build_early(early: EarlyShards) -> Build:
    """Return what builds layers together with all replicas, and shards those that can share nothing with others."""

    def build(layer: Layer, name: str) -> nn.Module:
        built: nn.Module | PenstockError
        try:
            built = build_layer(layer, name)
        except PenstockError as error:
            built = error
        is_separate = not isinstance(layer, nn.Module) and not _may_share(layer)
        return early.agree(name, built, is_separate=is_separate)

    return build


def build_own(
    layers: Sequence[Layer], names: Sequence[str], own: Collection[int], build: Build = build_layer
) -> BuiltLayers:
    """Build this rank's layers, whose indices are `own`, and look what their builders share with others.

    Raises:
        PartitionError: a layer cannot be built.
    """
    built = {index: build(layers[index], names[index]) for index in own}
    kept: dict[int, str] = {}
    for index, module in built.items() if len(own) < len(layers) else ():
        if not isinstance(layers[index], nn.Module):
            kept |= {id(parameter): name for name, parameter in named_parameters(names[index], module)}
    looks = bool(kept) or any(True for module in built.values() for _ in module.buffers())
    others = [index for index, layer in enumerate(layers) if looks and index not in own and _may_share(layer)]
    seen = {index: each for index in others if isinstance(each := _glance(layers[index]), nn.Module)}
    shared = [
        (kept[id(parameter)], name)
        for index, layer in seen.items()
        for name, parameter in named_parameters(names[index], layer)
        if id(parameter) in kept
    ]
    return BuiltLayers(built, shared, seen)


def refuse_shared_objects(shared: Sequence[Pair], transport: Transport) -> None:
    """Refuse what builders share where the ranks are threads of one process, and so hold the very same object.

    Raises:
        PartitionError: naming the first pair that any rank has found.
    """
    if shared and shares_process(transport):
        raise PartitionError(
            f"{shared[0][0]!r} and {shared[0][1]!r} are one parameter, which the builders of two layers share, but "
            "ranks that are threads of one process would both add to its gradient; let each builder make a parameter "
            "of its own, and tie the two by name, as in tied=[('0.weight', '5.weight')]"
        )


def _glance(layer: Any) -> Any:
    """A layer as another rank would build it, without allocating anything. None where that cannot be found out."""
    if isinstance(layer, nn.Module):
        return layer
    try:
        with torch.device("meta"):  # where nothing is drawn at random either
            return getattr(layer, "build", layer)()
    except Exception:  # its own rank builds it for real, and says what is wrong
        return None


def _may_share(builder: Any) -> bool:
    """Whether a builder refers to what another one may refer to as well: a tensor, a module, or a cache of results."""
    waiting: list[Any] = [builder]
    seen: set[int] = set()
    while waiting:
        found = waiting.pop()
        if issubclass(type(found), _SHAREABLE) or len(seen) > _MAX_OBJECTS:
            return True
        if id(found) not in seen:
            seen.add(id(found))
            waiting.extend(_referred_to(found))
    return False


def _referred_to(found: Any) -> Iterable[Any]:
    """The objects that one uses when it is called: those that a function closes over or names, or its attributes."""
    match found:
        case FunctionType():
            cells = [cell.cell_contents for cell in found.__closure__ or () if _is_filled(cell)]
            named = (found.__globals__[name] for name in _names(found.__code__) if name in found.__globals__)
            own = not str(found.__module__).startswith("torch.")
            return chain(cells, found.__defaults__ or (), (found.__kwdefaults__ or {}).values(), named if own else ())
        case MethodType():
            return (found.__func__, found.__self__)
        case partial():
            return (found.func, *found.args, *found.keywords.values())
        case dict():
            return found.values()
        case list() | tuple() | set() | frozenset():
            return found
        case type():
            return [each for each in (vars(found).get("__init__"),) if isinstance(each, FunctionType)]
        case ModuleType() | str() | bytes() | int() | float():
            return ()
    slots = (name for kind in type(found).__mro__ for name in getattr(kind, "__slots__", ()) or ())
    return (
        *getattr(found, "__dict__", {}).values(),
        *(getattr(found, name) for name in slots if not name.startswith("__") and hasattr(found, name)),
        *(call for call in (getattr_static(type(found), "__call__", None),) if isinstance(call, FunctionType)),
    )


def _names(code: CodeType) -> Iterator[str]:
    """The global names, and some of attributes, that a function and the functions within it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # of a variable that has no value yet
        return False
