"""The hook of a stream that prepares microbatches, and what it is told of the one that it prepares."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError, described

Preprocess = Callable[..., Any]
"""Takes what the iterator gave, and a `StreamContext` where it needs two arguments; returns what the stream is to yield
instead."""


@dataclass(frozen=True, slots=True)
class StreamContext:
    """The place in training of a microbatch that a `Stream` has pulled: the second argument of its `preprocess`."""

    index: int
    """Index of the microbatch in its step."""
    number: int
    """Number of microbatches of the step, in this replica."""
    is_training: bool
    """Whether the step trains; False in an evaluation."""
    step: int
    """Number of training steps that have succeeded before: the pipeline's `step_number`."""


class Preprocessor:
    """Prepares the items of a stream by a function, or leaves them as they are without one.

    A function that can be called with the item alone gets the item; one that needs two arguments gets the context too.

    Raises:
        ConfigError: it is no function, or can be called in neither way.
    """

    def __init__(self, function: Preprocess | None) -> None:
        self._function = function
        self.needs_context = function is not None and _needs_context(function)

    def prepare(self, item: Any, context: StreamContext) -> Any:
        """Return what the function makes of an item."""
        if self._function is None:
            return item
        return self._function(item, context) if self.needs_context else self._function(item)


def _needs_context(function: Preprocess) -> bool:
    if not callable(function):
        raise ConfigError(f"{described(function)}; expected a function of an item", key="preprocess")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a built-in function tells nothing
        return False
    if _takes(signature, 1):
        return False
    if not _takes(signature, 2):
        raise ConfigError(
            f"a function of {signature} can be called neither with an item nor with an item and a ps.StreamContext; "
            "give its other parameters defaults",
            key="preprocess",
        )
    return True


def _takes(signature: inspect.Signature, num_arguments: int) -> bool:
    try:
        signature.bind(*[None] * num_arguments)
    except TypeError:
        return False
    return True
