"""Gradients of weights that a backward has left for later, and how they are added up.

All gradients of a parameter come in one call of autograd, so that its hooks see one gradient, their sum. There are few
calls for small parameters, and only a few large gradients at a time.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

_GROUP_BYTES = 2**20


class LateGradient(Protocol):
    """What one product leaves: the gradients of its weights, still to be computed."""

    @property
    def roots(self) -> Sequence[Tensor | GradientEdge]:
        """Where the gradients of the weights enter the graph that leads to the parameters."""
        ...

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The parameters that the weights are made of, often themselves."""
        ...

    @property
    def gradient(self) -> Tensor | None:
        """The gradient of the product's output, until it was finished with."""
        ...

    def finish(self) -> Sequence[Tensor]:
        """Return the gradients, one per root, once, and let go of what they were computed from."""
        ...


def add_gradients(late: Sequence[LateGradient]) -> None:
    """Compute the gradients and add them to those of the parameters, in the order in which a backward comes to them."""
    for group in _batches(_by_parameter(late)):
        roots: list[Any] = [root for each in group for root in each.roots]
        torch.autograd.backward(roots, [gradient for each in group for gradient in each.finish()])


def _by_parameter(late: Sequence[LateGradient]) -> Iterable[list[LateGradient]]:
    """Put together what shares a parameter."""
    groups: dict[int, list[LateGradient]] = {}  # by id of a parameter
    for each in late:
        joined = [*{id(found): found for key in map(id, each.parameters) if (found := groups.get(key))}.values()]
        group = joined[0] if joined else []
        for other in joined[1:]:
            group += other
        group.append(each)
        groups |= {id(parameter): group for member in group for parameter in member.parameters}
    return {id(group): group for group in groups.values()}.values()


def _batches(groups: Iterable[list[LateGradient]]) -> Iterator[list[LateGradient]]:
    batch: list[LateGradient] = []
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
