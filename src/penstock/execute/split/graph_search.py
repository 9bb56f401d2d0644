"""Searches the graph of a forward for products of activations and weights whose gradients can be deferred.

    loss <- Add <- Mm <- Gelu <- Addmm <- ... <- input          what I goes through
                   |             |    |
                   T             T    bias                      W waits; vectors do not
                   |             |
                   W1            W2

A weight gradient can be deferred if everything that leads to the weight is the right side of a product: then one
gradient comes of it, at one moment. The weight may be a parameter or made of parameters alone in a few steps, such as
a cast or a transposition.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from penstock.execute.split.compiled_block import read_compiled_block
from penstock.execute.split.deferred import Deferred, find_parameters
from penstock.execute.split.products import NODES
from penstock.execute.split.weight_grad_mode import SPLIT_PRODUCT, read_split_product
from penstock.execute.undocumented import LEAF, TRANSPOSITION, is_reentrant_checkpoint, kind_of, leaf_of
from penstock.execute.undocumented_compiler import COMPILED

_READERS: dict[str, Callable[[Node], Deferred | None]] = NODES | {
    SPLIT_PRODUCT: read_split_product,
    COMPILED: read_compiled_block,
}


@dataclass(slots=True, eq=False)
class Survey:
    """What a graph consists of, as far as splitting its backward goes."""

    deferred: list[Deferred]
    """The products whose weight gradients are deferred."""
    immediate: list[Tensor]
    """The leaves whose gradients are computed in I, the stage's inputs among them."""
    sizes: dict[int, float]
    """Per id of a weight in a product, the multiplications of its gradient."""
    hooked: set[int]
    """Ids of weights whose products keep their activations elsewhere, such as under checkpointing."""
    is_opaque: bool
    """Whether part of the graph must be run by a backward to all leaves, as reentrant checkpointing must."""


def search(edges: Sequence[GradientEdge], small: frozenset[int]) -> Survey:
    """Walk a graph from the gradients of its outputs to all its leaves; `small` are ids of weights not to defer."""
    found = _Search(small)
    found.walk([edge.node for edge in edges])
    found.settle()
    found.survey.immediate = list({id(leaf): leaf for leaf in found.leaves.values()}.values())
    return found.survey


class _Search:
    """A walk through what I computes, which ends at the leaves and at weights whose gradients are deferred."""

    def __init__(self, small: frozenset[int]) -> None:
        self.survey = Survey([], [], {}, set(), False)
        self.leaves: dict[Node, Tensor] = {}
        self._small = small
        self._seen: set[Node] = set()
        self._leading_to: dict[Deferred, list[Node]] = {}
        """Per product that may be deferred, the nodes from its weights to their parameters, both included."""

    def walk(self, waiting: list[Node]) -> None:
        """Walk on from some nodes."""
        while waiting:
            node = waiting.pop()
            if node in self._seen:
                continue
            self._seen.add(node)
            kind = kind_of(node)
            if kind == LEAF:
                self.leaves[node] = leaf_of(node)
                continue
            self.survey.is_opaque |= is_reentrant_checkpoint(kind)
            followed = node.next_functions
            reader = _READERS.get(kind)
            product = None if reader is None else reader(node)
            if product is not None and self._may_defer(product):
                self.survey.deferred.append(product)
                followed = tuple(each for place, each in enumerate(followed) if place not in product.places)
            waiting.extend([following for following, _ in followed if following is not None])

    def settle(self) -> None:
        """Defer no product whose weights something else leads to, or that shares a parameter with such a product.

        A node between a weight and its parameters may be one that I runs, such as a product of another weight and
        inputs without gradient: it runs only once.
        """
        # Until nothing changes: to walk on from one product may lead to the weight of another.
        while reached := [each for each in self.survey.deferred if not self._seen.isdisjoint(self._leading_to[each])]:
            self.survey.deferred = [each for each in self.survey.deferred if each not in reached]
            for each in reached:
                self.walk([root.node for root in each.roots])

    def _may_defer(self, product: Deferred) -> bool:
        found = find_parameters([root.node for root in product.roots])
        if found is None:
            return False
        product.parameters, nodes = found
        # What it takes to lead the gradient on through other nodes is not known.
        is_plain = all(kind_of(node) in (LEAF, TRANSPOSITION) for node in nodes)
        size = product.num_multiplications if is_plain else math.inf
        ids = [id(parameter) for parameter in product.parameters]
        for key in ids:
            self.survey.sizes[key] = self.survey.sizes.get(key, 0.0) + size
        if not self._small.isdisjoint(ids):
            return False
        if product.is_hooked:
            self.survey.hooked.update(ids)
            return False
        self._leading_to[product] = nodes
        return True
