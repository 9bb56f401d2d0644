"""Searches the graph of a forward for products of activations and weights whose gradients may wait.

    loss <- Add <- Mm <- Gelu <- Addmm <- ... <- input          what the input part goes through
                   |             |    |
                   T             T    bias                      W waits; vectors do not
                   |             |
                   W1            W2

A weight may wait if everything that leads to it is the right side of a product: then one gradient comes of it, at one
moment. It may be a parameter or made of parameters alone in a few steps, such as a cast or a transposition.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from penstock.execute.split.parted_products import PARTED, read_parted
from penstock.execute.split.product_nodes import WaitingProduct, keeps_elsewhere, read_product

_MAX_NODES = 16
_LEAF = "AccumulateGrad"
_PLAIN = (_LEAF, "TBackward0")


@dataclass(slots=True, eq=False)
class Survey:
    """What a graph consists of, as far as splitting its backward goes."""

    late: list[WaitingProduct]
    """The products whose weights wait."""
    early: list[Tensor]
    """The leaves whose gradients are computed at once, the stage's inputs among them."""
    sizes: dict[int, float]
    """Per id of a weight in a product, the multiplications of its gradient."""
    hooked: set[int]
    """Ids of weights whose products keep their activations elsewhere, such as under checkpointing."""
    is_opaque: bool
    """Whether part of the graph must be run by a backward to all leaves, as reentrant checkpointing must."""


def search(edges: Sequence[GradientEdge], whole: frozenset[int]) -> Survey:
    """Walk a graph from the gradients of its outputs to all its leaves; `whole` are ids of weights that do not wait."""
    found = _Search(whole)
    found.walk([edge.node for edge in edges])
    found.settle()
    found.survey.early = list({id(leaf): leaf for leaf in found.leaves.values()}.values())
    return found.survey


class _Search:
    """A walk through what the input part computes, which ends at the leaves and at weights that wait."""

    def __init__(self, whole: frozenset[int]) -> None:
        self.survey = Survey([], [], {}, set(), False)
        self.leaves: dict[Node, Tensor] = {}
        self._whole = whole
        self._seen: set[Node] = set()
        self._leading_to: dict[WaitingProduct, list[Node]] = {}
        """Per product that may wait, the nodes from its weights to their parameters, both included."""

    def walk(self, waiting: list[Node]) -> None:
        """Walk on from some nodes."""
        while waiting:
            node = waiting.pop()
            if node in self._seen:
                continue
            self._seen.add(node)
            kind = type(node).__name__
            if kind == _LEAF:
                self.leaves[node] = node.variable  # type: ignore[attr-defined]
                continue
            self.survey.is_opaque |= "CheckpointFunction" in kind
            followed = node.next_functions
            product = read_parted(node) if kind == PARTED else read_product(node, kind)
            if product is not None and self._may_wait(product):
                self.survey.late.append(product)
                followed = tuple(each for place, each in enumerate(followed) if place not in product.places)
            waiting.extend([following for following, _ in followed if following is not None])

    def settle(self) -> None:
        """Let no product wait whose weights something else leads to, or that shares a parameter with such a product.

        A node between a weight and its parameters may be one that the input part runs, such as a product of another
        weight and inputs without gradient: it runs only once.
        """
        while early := [each for each in self.survey.late if not self._seen.isdisjoint(self._leading_to[each])]:
            self.survey.late = [each for each in self.survey.late if each not in early]
            for each in early:
                self.walk([root.node for root in each.roots])

    def _may_wait(self, product: WaitingProduct) -> bool:
        nodes = _find_parameters(product)
        if nodes is None:
            return False
        ids = [id(parameter) for parameter in product.parameters]
        for key in ids:
            self.survey.sizes[key] = self.survey.sizes.get(key, 0.0) + product.num_multiplications
        if not self._whole.isdisjoint(ids):
            return False
        if product.is_hooked:
            self.survey.hooked.update(ids)
            return False
        self._leading_to[product] = nodes
        return True


def _find_parameters(product: WaitingProduct) -> list[Node] | None:
    """Find the parameters that a product's weights are made of, and return the nodes that lead to them.

    None if the weights are not made of these alone, or not without what is kept elsewhere, such as under checkpointing:
    the weight part would have it computed once more.
    """
    waiting, nodes = [edge.node for edge in product.roots], []
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        kind = type(node).__name__
        if kind not in _PLAIN:
            product.num_multiplications = math.inf  # what it takes to lead the gradient on is not known
        if kind == _LEAF:
            variable = node.variable  # type: ignore[attr-defined]
            if not isinstance(variable, nn.Parameter):
                return None
            product.parameters.append(variable)
        elif len(nodes) > _MAX_NODES or keeps_elsewhere(node):
            return None
        waiting.extend([following for following, _ in node.next_functions if following is not None])
    return nodes
