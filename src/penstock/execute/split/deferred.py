"""`Deferred`: weight gradients that a backward leaves for later, and how those of many are added up.

All gradients of a parameter come in one call of autograd, so that its hooks see one gradient, their sum. There are few
calls for small parameters, and only a few large gradients at a time.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from penstock.execute.undocumented import LEAF, is_any_hooked, kind_of, leaf_of

_GROUP_BYTES = 2**20
_MAX_NODES = 16


class Deferred(Protocol):
    """The weight gradients of one node of a graph, such as a product, between I and W.

    It holds the node until I has run, then what W needs, and nothing afterwards.
    """

    node: Any
    places: Sequence[int]
    """Which of the node's next functions are those of weights that need a gradient."""
    roots: Sequence[GradientEdge]
    """Where the weight gradients enter the graph that leads to the parameters: the next functions at `places`."""
    parameters: Sequence[Tensor]
    """What the weights are made of, often themselves; set by the search."""
    is_hooked: bool
    """Whether what W needs is kept by others, such as checkpointing: then it can be asked for only once."""

    @property
    def num_multiplications(self) -> float:
        """How many the weight gradients take; infinite where they say nothing of the time."""
        ...

    @property
    def kept(self) -> list[Tensor]:
        """The tensors that are held between I and W, parameters apart."""
        ...

    def end(self) -> GradientEdge | None:
        """Return where the output's gradient arrives, if the weights are all that the node leads to."""
        ...

    def watch(self, found: "list[Deferred]") -> None:
        """Have the backward that comes through the node keep what W needs, and add this to a list then."""
        ...

    def release(self) -> None:
        """Forget the node; called once I has run."""
        ...

    def finish(self) -> Sequence[Tensor | None]:
        """Compute the gradients, one per root, None where none came, and release everything."""
        ...


def find_parameters(roots: Iterable[Node]) -> tuple[list[nn.Parameter], list[Node]] | None:
    """Find the parameters that weights are made of, and the nodes that lead to them, both ends included.

    None if the weights are not made of parameters alone, in a few steps such as a cast or a transposition, or not
    without what is kept elsewhere, such as under checkpointing: W would have it computed once more.
    """
    parameters: list[nn.Parameter] = []
    nodes: list[Node] = []
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        if kind_of(node) == LEAF:
            leaf = leaf_of(node)
            if not isinstance(leaf, nn.Parameter):
                return None
            parameters.append(leaf)
        elif len(nodes) > _MAX_NODES or is_any_hooked(node):
            return None
        waiting.extend([following for following, _ in node.next_functions if following is not None])
    return parameters, nodes


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
        joined = [*{id(found): found for key in map(id, each.parameters) if (found := groups.get(key))}.values()]
        group = joined[0] if joined else []
        for other in joined[1:]:
            group += other
        group.append(each)
        groups |= {id(parameter): group for member in group for parameter in member.parameters}
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
