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
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, MethodWrapperType, ModuleType
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
    """Build this rank's layers, and find the parameters that they share with layers of other ranks.

    A layer is a module, or a builder: a function (or a spec) that returns a module. Two builders share a parameter
    where both close over one object. If another rank builds the second layer, it gets an object of its own, and the
    two must be tied. `local_indices` are the indices of this rank's layers; `names` has the names of all layers.

    Raises:
        PartitionError: a layer cannot be built.
    """
    local_layers = {index: build(layers[index], names[index]) for index in local_indices}
    # Names of the parameters that builders of this rank have made or closed over, by identity. A rank that holds all
    # layers needs none of this.
    local_names: dict[int, str] = {}
    for index, module in local_layers.items() if len(local_indices) < len(layers) else ():
        if not isinstance(layers[index], nn.Module):
            local_names |= {id(parameter): name for name, parameter in named_parameters(names[index], module)}
    # Buffers of this rank may be shared, too; the remote layers are returned to whoever compares them.
    may_share = bool(local_names) or any(True for module in local_layers.values() for _ in module.buffers())
    remote_builders = {
        index: layer
        for index, layer in enumerate(layers)
        if may_share and index not in local_indices and _may_share(layer)
    }
    # On the meta device a builder takes no memory for what it makes, and still returns the object that it closes over.
    meta_layers = {index: _on_meta_device(layer) for index, layer in remote_builders.items()}
    remote_layers = {index: layer for index, layer in meta_layers.items() if isinstance(layer, nn.Module)}
    shared = [
        (local_names[id(parameter)], name)
        for index, layer in remote_layers.items()
        for name, parameter in named_parameters(names[index], layer)
        if id(parameter) in local_names
    ]
    return BuiltLayers(local_layers, shared, remote_layers)


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
            pending_objects.extend(_objects_referred_to(value))
    return False


def _objects_referred_to(value: Any) -> Iterable[Any]:
    """Return the objects that `value` may use when a builder calls it; one step of a search for shared tensors.

    A function uses the variables that it closes over, its defaults, and the globals that its code names. An instance of
    a class uses its attributes and the `__call__` of its class. A class uses its `__init__`.
    """
    match value:
        case FunctionType():
            cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            names = _names_in_code(value.__code__)
            global_values = (value.__globals__[name] for name in names if name in value.__globals__)
            # The globals of torch's own functions lead to the whole of torch, which holds modules and caches.
            is_users_code = not str(value.__module__).startswith("torch.")
            defaults = (value.__defaults__ or (), (value.__kwdefaults__ or {}).values())
            return chain(cells, *defaults, global_values if is_users_code else ())
        case MethodType():
            return (value.__func__, value.__self__)
        case BuiltinMethodType() | MethodWrapperType():  # such as `layers.__getitem__` of a list
            return (value.__self__,)
        case partial():
            return (value.func, *value.args, *value.keywords.values())
        case dict():
            return value.values()
        case list() | tuple() | set() | frozenset():
            return value
        case type():
            init = vars(value).get("__init__")
            return [init] if isinstance(init, FunctionType) else []
        case ModuleType() | str() | bytes() | int() | float():
            return ()
    # Any other object: its attributes in `__dict__` and in slots, and its `__call__` if that is written in Python.
    slots = (name for class_ in type(value).__mro__ for name in getattr(class_, "__slots__", ()) or ())
    call = getattr_static(type(value), "__call__", None)
    return (
        *getattr(value, "__dict__", {}).values(),
        *(getattr(value, name) for name in slots if not name.startswith("__") and hasattr(value, name)),
        *([call] if isinstance(call, FunctionType) else []),
    )


def _names_in_code(code: CodeType) -> Iterator[str]:
    """Yield the names of globals, and some of attributes, that a function and the functions within it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in_code(constant)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # of a variable that has no value yet
        return False
