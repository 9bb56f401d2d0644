"""`Deferred`: weight gradients that a backward leaves for later, and how those of many are added up.

All gradients of a parameter come in one call of autograd, so that its hooks see one gradient, their sum. There are few
calls for small parameters, and only a few large gradients at a time.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from penstock.execute.undocumented import metadata_at

_GROUP_BYTES = 2**20


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


class Deferred(Protocol):
    """Weight gradients of a graph between I and W.

    They hold a node until I has run, then what W needs, and nothing afterwards.
    """

    node: Any
    roots: Sequence[GradientEdge]
    """Where the weight gradients enter the graph that leads to the parameters."""
    parameters: Sequence[Tensor]
    """What the weights are made of, often themselves."""
    rung: Rung

    @property
    def num_multiplications(self) -> float:
        """How many the weight gradients take; infinite where they say nothing of the time."""
        ...

    @property
    def kept(self) -> list[Tensor]:
        """The tensors that are held between I and W, parameters apart."""
        ...

    def take(self, gradients: Sequence[Tensor | None]) -> None:
        """Keep what W needs, with the gradients that have come to the node, or were handed over."""
        ...

    def release(self) -> None:
        """Forget the node; called once I has run."""
        ...

    def finish(self) -> Sequence[Tensor | None]:
        """Compute the gradients, one per root, None where none came, and release everything."""
        ...


class DeferredNode(Deferred, Protocol):
    """Those of one node that I runs or ends at, such as a product."""

    places: Sequence[int]
    """Which of the node's next functions are those of weights that need a gradient; the roots are these."""
    parameters: Sequence[Tensor]
    """Set by the search."""
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


def add_weight_gradients(deferred: Sequence[Deferred]) -> None:
    """Compute the gradients and add them to those of the parameters, in the order in which a backward comes to them."""
    # Few calls of autograd, since each takes its time, but not one for all: all gradients would be alive at once,
    # beside those that they are added to.
    for group in _batches(_by_parameter(deferred)):
        roots = [root for each in group for root in each.roots]
        with torch.no_grad():  # weights are among what they are computed from
            gradients = [gradient for each in group for gradient in each.finish()]
        used = [(root, gradient) for root, gradient in zip(roots, gradients, strict=True) if gradient is not None]
        if used:
            edges: list[Any] = [root for root, _ in used]
            torch.autograd.backward(edges, [gradient for _, gradient in used])


def _by_parameter(deferred: Sequence[Deferred]) -> Iterable[list[Deferred]]:
    """Put together what shares a parameter."""
    groups: dict[int, list[Deferred]] = {}  # by id of a parameter
    for each in deferred:
        keys = [id(parameter) for parameter in each.parameters]
        joined = [*{id(found): found for key in keys if (found := groups.get(key))}.values()]
        group = joined[0] if joined else []
        for other in joined[1:]:
            group += other
            keys += [id(parameter) for member in other for parameter in member.parameters]
        group.append(each)
        groups |= dict.fromkeys(keys, group)
    return {id(group): group for group in groups.values()}.values()


def _batches(groups: Iterable[list[Deferred]]) -> Iterator[list[Deferred]]:
    batch: list[Deferred] = []
    num_bytes = 0
    for group in groups:
        own_bytes = sum([parameter.nbytes for each in group for parameter in each.parameters])
        if batch and num_bytes + own_bytes > _GROUP_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch = batch + group
        num_bytes += own_bytes
    if batch:
        yield batch
