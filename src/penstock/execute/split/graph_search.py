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

from penstock.execute.split.parted_products import PARTED, PartedNode, read_parted
from penstock.execute.split.product_nodes import ProductNode, read_product

_MAX_NODES = 16
_LEAF = "AccumulateGrad"
_PLAIN = (_LEAF, "TBackward0")


@dataclass(slots=True, eq=False)
class Survey:
    """What a graph consists of, as far as splitting its backward goes."""

    late: list[ProductNode | PartedNode]
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
    survey = Survey([], [], {}, set(), False)
    leaves: dict[Node, Tensor] = {}
    seen: set[Node] = set()
    waiting = [edge.node for edge in edges]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        kind = type(node).__name__
        if kind == _LEAF:
            leaves[node] = node.variable  # type: ignore[attr-defined]
            continue
        survey.is_opaque |= "CheckpointFunction" in kind
        followed = node.next_functions
        product = read_parted(node) if kind == PARTED else read_product(node, kind)
        if product is not None and _find_parameters(product) and _may_wait(product, whole, survey):
            survey.late.append(product)
            followed = tuple(each for place, each in enumerate(followed) if place not in product.places)
        waiting.extend([following for following, _ in followed if following is not None])
    _settle(survey, leaves)
    return survey


def _find_parameters(product: ProductNode | PartedNode) -> bool:
    """Find the parameters that a product's weights are made of; false if they are not made of these alone."""
    waiting, num_nodes = [edge.node for edge in product.roots], 0
    while waiting:
        node = waiting.pop()
        num_nodes += 1
        kind = type(node).__name__
        if kind not in _PLAIN:
            product.num_multiplications = math.inf  # what it takes to lead the gradient on is not known
        if kind == _LEAF:
            variable = node.variable  # type: ignore[attr-defined]
            if not isinstance(variable, nn.Parameter):
                return False
            product.parameters.append(variable)
        elif num_nodes > _MAX_NODES:
            return False
        waiting.extend([following for following, _ in node.next_functions if following is not None])
    return True


def _may_wait(product: ProductNode | PartedNode, whole: frozenset[int], survey: Survey) -> bool:
    ids = [id(parameter) for parameter in product.parameters]
    for key in ids:
        survey.sizes[key] = survey.sizes.get(key, 0.0) + product.num_multiplications
    if not whole.isdisjoint(ids):
        return False
    if product.is_hooked:
        survey.hooked.update(ids)
        return False
    return True


def _settle(survey: Survey, leaves: dict[Node, Tensor]) -> None:
    """A weight that something else leads to, too, does not wait, nor does what shares a product with it."""
    early = {id(leaf): leaf for leaf in leaves.values()}
    num_late = -1
    while num_late != len(survey.late):
        num_late = len(survey.late)
        kept = []
        for each in survey.late:
            if any(id(parameter) in early for parameter in each.parameters):
                early.update({id(parameter): parameter for parameter in each.parameters})
            else:
                kept.append(each)
        survey.late = kept
    survey.early = list(early.values())
