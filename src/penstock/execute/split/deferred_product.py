"""One product whose weight gradients a backward leaves for later, and how those of many are added up.

All gradients of a parameter come in one call of autograd, so that its hooks see one gradient, their sum. There are few
calls for small parameters, and only a few large gradients at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from penstock.errors import PipelineError
from penstock.execute.split.formulas import Formula, Weights
from penstock.execute.undocumented import LEAF, is_any_hooked, kind_of, leaf_of, version_of

_GROUP_BYTES = 2**20
_MAX_NODES = 16


@dataclass(slots=True, eq=False)
class DeferredProduct:
    """A product in a graph. It holds a node until the backward has run, then what W needs, and nothing afterwards."""

    node: Any
    formula: Formula
    weights: Weights
    places: Sequence[int]
    """Which of the node's next functions are those of weights that need a gradient."""
    open: Callable[[Any], Tensor]
    """Gets the activations from the node."""
    is_hooked: bool = False
    """Whether the activations are kept by others, such as checkpointing: then they can be asked for only once."""
    parameters: Sequence[Tensor] = ()
    """What the weights are made of, often themselves."""
    roots: Sequence[GradientEdge] = field(init=False)
    """Where the weight gradients enter the graph that leads to the parameters."""
    gradient: Tensor | None = None
    """That of the output, between I and W."""
    activations: Tensor | None = None
    """Between I and W."""
    _activations_version: int = 0

    def __post_init__(self) -> None:
        following = self.node.next_functions
        self.roots = [GradientEdge(*following[place]) for place in self.places]

    @property
    def kept(self) -> list[Tensor]:
        """What W needs, parameters apart."""
        found = (self.gradient, self.activations, *self.weights)
        return [each for each in found if each is not None and not isinstance(each, nn.Parameter)]

    def end(self) -> GradientEdge | None:
        """Return where the output's gradient arrives, if the weights are all that the product leads to."""
        others = [node for place, (node, _) in enumerate(self.node.next_functions) if place not in self.places]
        return GradientEdge(self.node, 0) if others.count(None) == len(others) else None

    def watch(self, products: list["DeferredProduct"]) -> None:
        """Have the backward that comes through the node keep what W needs, and add the product to a list.

        It raises torch's own error if the activations have been changed in place.
        """

        def keep(gradients: tuple[Tensor | None, ...]) -> None:
            # Before the node runs: afterwards autograd has freed what it saved.
            if gradients[0] is not None:
                self.activations = self.open(self.node).detach()
                self._activations_version = version_of(self.activations)
                self.gradient = gradients[0]
                products.append(self)

        self.node.register_prehook(keep)

    def release(self) -> None:
        """Forget the node, whose hook knows the product: together they would live on."""
        self.node = None

    def finish(self) -> Sequence[Tensor]:
        """Return the gradients of the weights, one per root, and release everything.

        Raises:
            PipelineError: if the activations have been changed in place since the backward ran.
        """
        activations, gradient, weights = self.activations, self.gradient, self.weights
        assert activations is not None
        assert gradient is not None
        self.activations = self.gradient = None
        self.weights = ()
        if version_of(activations) != self._activations_version:
            raise PipelineError(
                f"activations of shape {tuple(activations.shape)}, which a layer multiplied by its weights, were "
                f"changed in place between I and W of a split backward: they are at version {version_of(activations)}, "
                f"expected {self._activations_version}. Let the layer use a copy (clone()) of what it changes, such as "
                "a buffer, or run a schedule with whole backwards"
            )
        found = weight_gradients(self.formula, gradient, activations, weights)
        return [each for each in found if each is not None]


def weight_gradients(formula: Formula, gradient: Tensor, activations: Tensor, weights: Weights) -> Weights:
    """Return the gradients of the weights in the weights' types, from which that of the product may differ."""
    found = formula.weight_gradients(gradient, activations, weights)
    return [
        each if each is None or weight is None or each.dtype == weight.dtype else each.to(weight.dtype)
        for each, weight in zip(found, weights, strict=True)
    ]


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


def add_weight_gradients(products: Sequence[DeferredProduct]) -> None:
    """Compute the gradients and add them to those of the parameters, in the order in which a backward comes to them."""
    # Few calls of autograd, since each takes its time, but not one for all: all gradients would be alive at once,
    # beside those that they are added to.
    for group in _batches(_by_parameter(products)):
        roots: list[Any] = [root for each in group for root in each.roots]
        with torch.no_grad():  # weights are among what they are computed from
            gradients = [gradient for each in group for gradient in each.finish()]
        torch.autograd.backward(roots, gradients)


def _by_parameter(products: Sequence[DeferredProduct]) -> Iterable[list[DeferredProduct]]:
    """Put together what shares a parameter."""
    groups: dict[int, list[DeferredProduct]] = {}  # by id of a parameter
    for each in products:
        joined = [*{id(found): found for key in map(id, each.parameters) if (found := groups.get(key))}.values()]
        group = joined[0] if joined else []
        for other in joined[1:]:
            group += other
        group.append(each)
        groups |= {id(parameter): group for member in group for parameter in member.parameters}
    return {id(group): group for group in groups.values()}.values()


def _batches(groups: Iterable[list[DeferredProduct]]) -> Iterator[list[DeferredProduct]]:
    batch: list[DeferredProduct] = []
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
