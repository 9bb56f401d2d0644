"""How a batch's arguments reach the layers of a stage: the first layer's by position, keywords by parameter name."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from penstock.errors import PipelineError, nearest
from penstock.execute.failures.places import note_place

_LEAF_IN_PLACE = "leaf Variable that requires grad is being used in an in-place operation"
"""What torch says; the inputs of a stage are leaves, those of a layer in the middle of a model are not."""
_IN_PLACE = (
    "a {layer} fails with: {error} What a stage gets from another one must stay as it is until its gradient has been "
    "taken, so its first layers may not change it in place. Let them work out of place, as ReLU(inplace=False) does, "
    "on a clone(), or move the border between the stages"
)


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


def run_layers(
    layers: Sequence[nn.Module],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    before_layer: Callable[[int], None] | None = None,
    *,
    names: Sequence[str] = (),
) -> Any:
    """Call the layers in order; what one returns is the single positional argument of the next.

    `before_layer` is called before each one with its number, from 0. With `names`, an error that a layer raises notes
    which layer it was.

    Raises:
        PipelineError: a layer changes an input in place whose gradient another stage waits for.
    """
    for index, layer in enumerate(layers):
        if before_layer is not None:
            before_layer(index)
        try:
            args = (layer(*args, **select_keywords(layer, kwargs, len(args))),)
        except Exception as error:
            told = _told(error, layer)
            if names:
                note_place(told, layer_place(names[index], layer))
            if told is error:
                raise
            raise told from error
    return args[0]


def layer_place(name: str, layer: object) -> str:
    """Return how messages name a layer: by its place in the list, or by its name where it has one, and by its class."""
    return f"layer {name if name.isdecimal() else repr(name)} ({type(layer).__name__})"


def _told(error: Exception, layer: nn.Module) -> Exception:
    """The error, or one that says more of it."""
    if isinstance(error, RuntimeError) and _LEAF_IN_PLACE in str(error):
        return PipelineError(_IN_PLACE.format(layer=type(layer).__name__, error=error))
    return error
