"""Copies of what leaves a stage in the memory of gathered weights, which is freed before others have used it.

A layer may return a view of a weight, hand it on as a skip, or leave it for a later slice.
"""

from collections.abc import Callable
from typing import Any

from penstock.execute.stages.feature import ForwardPart

Copied = Callable[[Any], Any]
"""Returns a value with copies of its tensors that lie in gathered weights."""


def as_it_is(value: Any) -> Any:
    """Return what a stage whose weights stay whole leaves."""
    return value


class OutlivingPart(ForwardPart):
    """One forward of a stage whose weights are gathered; the outermost feature, which sees all that leaves."""

    def __init__(self, copied: Copied) -> None:
        self._copied = copied

    def leave(self, outputs: Any) -> Any:
        return self._copied(outputs)
