"""How a batch's arguments reach the layers of a stage: the first layer's by position, keywords by parameter name."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from penstock.errors import PipelineError
from penstock.execute.control.error_notes import note_place
from penstock.execute.losses.tails import TailedOutput
from penstock.execute.stages.signatures import TakenKeywords
from penstock.execute.stages.stage import Stage
from penstock.execute.undocumented import is_leaf_changed_in_place
from penstock.microbatch_place import MICROBATCH_PLACE

_IN_PLACE = (
    "a {layer} fails with: {error} What a stage gets from another one must stay as it is until its gradient has been "
    "taken, so its first layers may not change it in place. Let them work out of place, as ReLU(inplace=False) does, "
    "on a clone(), or move the border between the stages"
)
_KEYWORD = "keyword argument"
"""Python's words for a keyword that a function does not take."""
_TOO_MANY = " were given"
"""Python's words for more positional arguments than a function takes."""
_TARGET = (
    "a {layer} fails with: {error}. The first layer gets all positional arguments of the call, here {number}. Pass "
    "what the loss compares the output with as target=, as in step(x, target=y)"
)
_ANY_KEYWORD = (
    "a {layer} fails with: {error}. Its forward has **kwargs and may use them itself, so it was given every keyword of "
    "the batch that is not filled by position: {names}. Let its forward name the keywords that it takes, or use "
    "**kwargs only to call the submodule that takes them, as in self.inner(x, **kwargs)"
)


def run_layers(
    stage: Stage,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    before_layer: Callable[[int], None] | None = None,
) -> Any:
    """Call the layers of a stage in order, and return the result of the last layer.

    A last layer that the loss applies is not called; it is in the result, a `TailedOutput`.
    The first layer gets all of `args`; each further layer gets the result of the layer before as its only positional
    argument. Every layer gets those of `kwargs` that its forward can take. `before_layer` is called before each layer
    with the index of the layer in the unsplit model. An error that a layer raises carries a note which layer it was.

    Raises:
        PipelineError: a layer changes an input in place whose gradient another stage waits for, or it passes on a
            keyword to a module that does not take this keyword.
    """
    layers = stage.modules if stage.tail is None else stage.modules[:-1]
    for index, layer in enumerate(layers):
        if before_layer is not None:
            before_layer(stage.first_layer + index)
        try:
            layer_kwargs = stage.taken_keywords[index].select(kwargs, len(args)) if kwargs else {}
            args = (layer(*args, **layer_kwargs),)
        except Exception as error:
            # A common mistake, such as a target among the arguments, gets an error that says how to mend it. Any other
            # error stays the layer's own.
            explained = _explained(error, layer, args, kwargs, stage.taken_keywords[index])
            note_place(explained, layer_place(stage.names[index], layer))
            if explained is error:
                raise
            raise explained from error
    return args[0] if stage.tail is None else TailedOutput(args[0], stage.tail)


def layer_place(name: str, layer: object) -> str:
    """Return how messages name a layer: by its place in the list, or by its name where it has one, and by its class."""
    return f"layer {name if name.isdecimal() else repr(name)} ({layer_class(layer)})"


def layer_class(layer: object) -> str:
    """Return how messages name the class of a layer; one that runs a part of a model names the module of that part."""
    return str(getattr(layer, "shown_class", type(layer).__name__))


def _explained(
    error: Exception, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], accepted: TakenKeywords
) -> Exception:
    """The error, or one that says more of it."""
    if is_leaf_changed_in_place(error):
        return PipelineError(_IN_PLACE.format(layer=layer_class(layer), error=error))
    if len(args) > 1 and isinstance(error, TypeError) and str(error).endswith(_TOO_MANY):
        return PipelineError(_TARGET.format(layer=layer_class(layer), error=error, number=len(args)))
    if kwargs and isinstance(error, TypeError) and _KEYWORD in str(error) and accepted.accepts_any_keyword:
        names = sorted(kwargs.keys() - {MICROBATCH_PLACE})
        return PipelineError(_ANY_KEYWORD.format(layer=layer_class(layer), error=error, names=names))
    return error
