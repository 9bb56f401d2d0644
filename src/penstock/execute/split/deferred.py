"""`Deferred`: weight gradients of a graph that a backward leaves for later."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.graph import GradientEdge

from penstock.execute.parameters.gradient_store import WeightEntry
from penstock.execute.undocumented import metadata_at


class Rung(StrEnum):
    """By what the gradient of a weight waits for W, or why it does not."""

    PRODUCT = "product"
    BRANCH = "weight branch"
    FUNCTION = "custom function"
    COMPILED = "compiled"
    OWN = "own"
    """By the layer itself: a closure, a builder, or the queue of a fused layer."""
    SMALL = "small"
    """Computed in I: to defer it takes longer."""
    OPAQUE = "opaque"
    """Computed in I: nothing tells the input's gradient from that of the weight."""


class Deferred(WeightEntry, Protocol):
    """Weight gradients of a graph between I and W.

    They hold a node until I has run, then what W needs, and nothing afterwards.
    """

    node: Any
    parameters: Sequence[Tensor]
    """Set by the search."""
    rung: Rung

    @property
    def num_multiplications(self) -> float:
        """How many the weight gradients take; infinite where they say nothing of the time."""
        ...

    def take(self, gradients: Sequence[Tensor | None]) -> None:
        """Keep what W needs, with the gradients that have come to the node, or were handed over."""
        ...

    def release(self) -> None:
        """Forget the node; called once I has run."""
        ...


class DeferredNode(Deferred, Protocol):
    """Those of one node that I runs or ends at, such as a product."""

    places: Sequence[int]
    """Which of the node's next functions are those of weights that need a gradient; the roots are these."""
    is_hooked: bool
    """Whether what W needs is kept by others, such as checkpointing: then it can be asked for only once."""

    def end(self) -> GradientEdge | None:
        """Return where the output's gradient arrives, if the weights are all that the node leads to."""
        ...

    def handover(self) -> GradientEdge | None:
        """Return where to stop a backward that hands over gradients, if the weights are all that the node leads to.

        At the `end()`, unless the node is to run.
        """
        ...

    def watch(self, found: list[Deferred]) -> None:
        """Have the backward that comes through the node keep what W needs (`take`), and add this to a list then."""
        ...


def fitted(gradient: Tensor | None, edge: GradientEdge) -> Tensor | None:
    """Return a gradient in the shape and type that belong to an edge, as autograd makes of what a function returns."""
    if gradient is None:
        return None
    expected = metadata_at(edge)
    if gradient.shape != expected.shape:
        gradient = gradient.sum_to_size(expected.shape)
    return gradient if gradient.dtype == expected.dtype else gradient.to(expected.dtype)
