"""A layer of a model's list: what it is called, and how it is built.

It is a module, used in place, or a callable that builds one, such as a `LayerSpec`, whose `name` becomes the prefix of
its parameters; else the container that holds the layers names it, else its index does.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from penstock.errors import PartitionError, PenstockError
from penstock.execute.stages.compiled_layers import without_wrappers
from penstock.execute.stages.names import layer_name
from penstock.execute.undocumented import has_hooks, is_out_of_memory

Layer = nn.Module | Callable[[], nn.Module]


def own_ties(layer: Layer) -> Iterable[tuple[str, str]]:
    """Return what a layer's spec says is tied; a module says nothing, its attributes mean something else."""
    return () if isinstance(layer, nn.Module) else getattr(layer, "tied", ())


def layer_names(layers: Sequence[Layer], default_names: Sequence[str] = ()) -> list[str]:
    """Return the prefix of each layer's parameters: the name in its spec, else its default name, else its index.

    Raises:
        PartitionError: if two layers have the same name.
    """
    defaults = default_names or range(len(layers))
    names = [layer_name(layer, default) for default, layer in zip(defaults, layers, strict=True)]
    for name in names:
        if names.count(name) > 1:
            raise PartitionError(f"{names.count(name)} layers are named {name!r}; give each layer a name of its own")
    return names


def build_layer(layer: Layer, name: str, memory: dict[int, Any] | None = None) -> nn.Module:
    """Build a layer; a module is used in place, or copied where there is a memory of copies.

    Raises:
        PartitionError: it cannot be built, or is no module then.
    """
    try:
        if isinstance(layer, nn.Module):
            return _with_values(layer, name) if memory is None else _copy(layer, name, memory)
        module = without_wrappers(layer())
    except PenstockError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise PartitionError(
                f"layer {name!r} does not fit in this rank's memory ({error}); make it smaller, or use more ranks"
            ) from error
        raise PartitionError(f"layer {name!r} cannot be built: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise PartitionError(f"layer {name!r} builds a {type(module).__name__}; expected an nn.Module")
    return _with_values(module, name)


def _with_values(module: nn.Module, name: str) -> nn.Module:
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise PartitionError(
            f"layer {name!r} is on the meta device, where tensors have no values; give a callable that builds it "
            "elsewhere, such as a LayerSpec, or call its to_empty(device=...) and initialize it first. A pipeline "
            "moves layers of other ranks there, unless it is made with frees_other_stages=False"
        )
    return module


def _copy(layer: nn.Module, name: str, memory: dict[int, Any]) -> nn.Module:
    if any(has_hooks(parameter) for parameter in layer.parameters()):
        raise _not_copied(name, "has parameters with hooks, which a copy would lose", " and registers the hooks")
    try:
        copied: nn.Module = copy.deepcopy(layer, memory)
    except (RuntimeError, TypeError) as error:
        raise _not_copied(name, f"cannot be copied ({error})") from error
    for module in layer.modules():
        copied_module = memory.get(id(module))
        # A wrapper that hands `__deepcopy__` on to what it wraps is missing in the copy.
        if copied_module is not None and any(memory.get(id(child)) is copied_module for child in module.children()):
            raise _not_copied(name, f"loses a {type(module).__name__} when it is copied")
    return copied


def _not_copied(name: str, problem: str, addition: str = "") -> PartitionError:
    return PartitionError(
        f"layer {name!r} {problem}, but another rank of this process uses it, or what it shares with others; give a "
        f"callable that builds the layer{addition}"
    )
