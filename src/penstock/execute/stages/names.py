"""The unsplit model's names of what a layer holds: the layer's name, and behind it the name within the layer.

A layer whose `has_full_names` is true, such as a part of `ps.cut`, knows the unsplit model's names itself: it may hold
`embed.weight` and `head.weight`, which have no prefix in common. Its `layer_name` is what tables and messages call it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn


def layer_name(layer: object, default: object) -> str:
    """Return what a spec, or a module that has full names, calls itself; of other modules attributes mean other things.

    `default` is the name that the list gives it.
    """
    if not isinstance(layer, nn.Module):
        return str(getattr(layer, "name", default))
    return str(layer.layer_name if getattr(layer, "has_full_names", False) is True else default)


def layer_weight(layer: object) -> float:
    """Return the compute of a layer, relative to others, likewise; 1 where it does not say."""
    says = not isinstance(layer, nn.Module) or getattr(layer, "has_full_names", False) is True
    name = "layer_weight" if isinstance(layer, nn.Module) else "weight"
    return float(getattr(layer, name, 1.0)) if says else 1.0


def full_name(layer: str, holder: object, local_name: str) -> str:
    """Return the unsplit model's name of what a layer, or its spec, calls `local_name`."""
    return local_name if getattr(holder, "has_full_names", False) is True else f"{layer}.{local_name}"


def named_parameters(
    layer: str, module: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a layer by the unsplit model's names."""
    for local_name, parameter in module.named_parameters(remove_duplicate=remove_duplicate):
        yield full_name(layer, module, local_name), parameter


def part_of_state(layer: str, module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a state by the unsplit model's names has for a layer, by the layer's own names."""
    if getattr(module, "has_full_names", False) is True:
        return {name: state[name] for name in module.state_dict() if name in state}
    prefix = f"{layer}."
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
