"""How a batch's arguments reach the layers of a stage: the first layer's by position, keywords by parameter name."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from penstock.errors import PipelineError, nearest


def keyword_names(module: nn.Module, num_positional: int = 1) -> list[str]:
    """List the parameters of `forward` that a keyword can fill when the first `num_positional` are already taken.

    A `**kwargs` of the module names nothing and so receives nothing.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    return [
        item.name
        for position, item in enumerate(parameters)
        if item.kind is inspect.Parameter.KEYWORD_ONLY
        or (item.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and position >= num_positional)
    ]


def select_keywords(module: nn.Module, kwargs: Mapping[str, Any], num_positional: int = 1) -> dict[str, Any]:
    """Return the entries of `kwargs` that `module.forward` names as parameters."""
    if not kwargs:
        return {}
    return {name: kwargs[name] for name in keyword_names(module, num_positional) if name in kwargs}


def check_keywords(layers: Sequence[nn.Module], kwargs: Mapping[str, Any], num_args: int) -> None:
    """Raise PipelineError for a keyword that no layer of the whole model takes; the first gets `num_args` values."""
    if not kwargs:
        return
    counts = [num_args, *[1] * (len(layers) - 1)]
    known = {name for layer, count in zip(layers, counts, strict=True) for name in keyword_names(layer, count)}
    for name in kwargs:
        if name not in known:
            raise PipelineError(
                f"no layer's forward has a free parameter {name!r}.{nearest(name, known)} "
                f"Layers take the keywords {sorted(known)}; rename or drop it"
            )


def run_layers(layers: Sequence[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call the layers in order; what one returns is the single positional argument of the next."""
    for layer in layers:
        args = (layer(*args, **select_keywords(layer, kwargs, len(args))),)
    return args[0]
