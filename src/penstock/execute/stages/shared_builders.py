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

    local_layers: Mapping[int, nn.Module]
    """Layers of this rank, by index."""
    shared: Sequence[Pair]
    """Names of one parameter: in a layer of this rank, and in one of another rank."""
    remote_layers: Mapping[int, nn.Module]
    """Layers of other ranks that may share something with this rank's, on the meta device, by index."""


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
    layers: Sequence[Layer], names: Sequence[str], local_indices: Collection[int], build: Build = build_layer
) -> BuiltLayers:
    """Build this rank's layers, and find the parameters that their builders share with layers of other ranks.

    Raises:
        PartitionError: a layer cannot be built.
    """
    built = {index: build(layers[index], names[index]) for index in local_indices}
    local_names: dict[int, str] = {}
    for index, module in built.items() if len(local_indices) < len(layers) else ():
        if not isinstance(layers[index], nn.Module):
            local_names |= {id(parameter): name for name, parameter in named_parameters(names[index], module)}
    may_share = bool(local_names) or any(True for module in built.values() for _ in module.buffers())
    remote = [(index, layer) for index, layer in enumerate(layers) if may_share and index not in local_indices]
    sharing = [(index, layer) for index, layer in remote if _may_share(layer)]
    glances = {index: _on_meta_device(layer) for index, layer in sharing}
    remote_layers = {index: layer for index, layer in glances.items() if isinstance(layer, nn.Module)}
    shared = [
        (local_names[id(parameter)], name)
        for index, layer in remote_layers.items()
        for name, parameter in named_parameters(names[index], layer)
        if id(parameter) in local_names
    ]
    return BuiltLayers(built, shared, remote_layers)


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


def _on_meta_device(layer: Any) -> Any:
    """Return a layer as another rank would build it, without memory; None where the builder fails."""
    if isinstance(layer, nn.Module):
        return layer
    try:
        with torch.device("meta"):  # where nothing is drawn at random either
            return getattr(layer, "build", layer)()
    except Exception:  # its own rank builds it for real, and says what is wrong
        return None


def _may_share(builder: Any) -> bool:
    """Whether a builder refers to what another one may refer to as well: a tensor, a module, or a cache of results."""
    pending_objects: list[Any] = [builder]
    visited_ids: set[int] = set()
    while pending_objects:
        value = pending_objects.pop()
        if issubclass(type(value), _SHAREABLE) or len(visited_ids) > _MAX_OBJECTS:
            return True
        if id(value) not in visited_ids:
            visited_ids.add(id(value))
            pending_objects.extend(_referred_to(value))
    return False


def _referred_to(value: Any) -> Iterable[Any]:
    """The objects that one uses when it is called: those that a function closes over or names, or its attributes."""
    match value:
        case FunctionType():
            cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            global_values = (value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__)
            is_users_code = not str(value.__module__).startswith("torch.")
            defaults = (value.__defaults__ or (), (value.__kwdefaults__ or {}).values())
            return chain(cells, *defaults, global_values if is_users_code else ())
        case MethodType():
            return (value.__func__, value.__self__)
        case partial():
            return (value.func, *value.args, *value.keywords.values())
        case dict():
            return value.values()
        case list() | tuple() | set() | frozenset():
            return value
        case type():
            return [init for init in (vars(value).get("__init__"),) if isinstance(init, FunctionType)]
        case ModuleType() | str() | bytes() | int() | float():
            return ()
    slots = (name for class_ in type(value).__mro__ for name in getattr(class_, "__slots__", ()) or ())
    return (
        *getattr(value, "__dict__", {}).values(),
        *(getattr(value, name) for name in slots if not name.startswith("__") and hasattr(value, name)),
        *(call for call in (getattr_static(type(value), "__call__", None),) if isinstance(call, FunctionType)),
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
