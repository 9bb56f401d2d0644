"""The part of a graph that computes weights: nodes from which backwards come to parameters and nothing else.

    x ──────────────> Mul <── Tanh <── T <── w           what is made of w alone: a branch, entered at Tanh
                       ^
    scores <── Mm <── Add <── Mm <── a, b                the same behind a product: the right side of Mm

Tensors without a gradient leave no edge. So a node of parameters and data, such as a layer that gets the inputs of the
first stage, looks like one of parameters and constants. Products with such a tensor are taken for the former, and so
are functions in Python whose output has another shape than the parameters. In branches, which need not be behind a
product, so are look-ups, all such functions, and all operations whose output has another shape.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.autograd.graph import GradientEdge, Node

from penstock.execute.undocumented import (
    ADDMM,
    BMM,
    CONVOLUTION,
    EMBEDDING,
    LEAF,
    LOOKUPS,
    MM,
    TRANSPOSITION,
    VIEWS,
    function_of,
    is_any_saved_elsewhere,
    is_function,
    kind_of,
    leaf_of,
    metadata_at,
)

_PRODUCTS = frozenset({MM, ADDMM, BMM, CONVOLUTION})
_MULTIPLICATIONS_PER_ELEMENT = 32
"""Multiplications of a product that take as long as one element of an elementwise operation."""
_PLAIN = frozenset({LEAF, TRANSPOSITION})

Rule = Callable[[Node], bool]
"""Returns whether a node may belong to the origin of weights."""


def open_places(node: Node, places: Sequence[int] | None = None) -> list[int]:
    """Return which of a node's next functions, or of some of them, get a gradient."""
    next_functions = node.next_functions
    return [
        place
        for place in (range(len(next_functions)) if places is None else places)
        if next_functions[place][0] is not None
    ]


def has_constants(node: Node) -> bool:
    """Whether a tensor without gradient comes to a node, such as data, or a number."""
    return None in [next_functions for next_functions, _ in node.next_functions]


def may_make_weights(node: Node) -> bool:
    """Whether a node behind a product may belong to what its weight is made of."""
    kind = kind_of(node)
    if kind == LEAF:
        return isinstance(leaf_of(node), nn.Parameter)
    if kind == EMBEDDING or not has_constants(node):
        return kind != EMBEDDING
    return _keeps_shape(node) if is_function(node) else kind not in _PRODUCTS


def makes_weights(node: Node) -> bool:
    """Whether a node may belong to a branch: it meets no data, as far as its kind and shape tell."""
    if not may_make_weights(node) or kind_of(node) in LOOKUPS:
        return False
    return not has_constants(node) or (not is_function(node) and _keeps_shape(node))


class WeightOrigin(NamedTuple):
    """The parameters that some weights are made of, and the nodes between."""

    parameters: Sequence[nn.Parameter]
    nodes: Sequence[Node]
    """The nodes from the weights to the parameters, both ends included."""

    @property
    def is_plain(self) -> bool:
        """Whether the weights are the parameters, as they are or transposed: the nodes then cost W nothing."""
        return _PLAIN.issuperset(map(kind_of, self.nodes))


class WeightGraph:
    """All that one walk knows of the nodes that make weights."""

    def __init__(self, asking: frozenset[Any] = frozenset()) -> None:
        """`asking` are the custom functions that ask which half of their backward is wanted."""
        self.functions: set[Any] = set()
        """The custom functions that the walk has come to."""
        self._asking = asking
        self._rejected_nodes: dict[Rule, set[Node]] = defaultdict(set)
        """Nodes that are known to lead to more than parameters, by rule."""

    def runs_in_parts(self, node: Node) -> bool:
        """Whether the plan runs the custom function of a node in two parts, as it has asked."""
        function = function_of(node)
        self.functions.add(function)
        return function in self._asking

    def origin_at(self, node: Any, places: Sequence[int], rule: Rule = may_make_weights) -> WeightOrigin | None:
        """Return the origin of the weights at some places of a node; None if there are no places."""
        next_node = node.next_functions
        return self.origin_behind([next_node[place][0] for place in places], rule) if places else None

    def origin_behind(self, roots: Sequence[Node], rule: Rule = may_make_weights) -> WeightOrigin | None:
        """Find the parameters that weights are made of; None if one of the nodes does not belong to them by the rule.

        None, too, where what a node has saved is kept elsewhere, such as under checkpointing: W would have it computed
        once more.
        """
        if len(roots) == 1 and (plain := _plain_weight(roots[0])) is not None:
            return plain
        nodes = self._nodes_behind(roots, rule)
        if nodes is None or any(map(is_any_saved_elsewhere, nodes)):
            return None
        parameters = {id(leaf): leaf for node in nodes if kind_of(node) == LEAF and (leaf := leaf_of(node)) is not None}
        return WeightOrigin(
            [parameter for parameter in parameters.values() if isinstance(parameter, nn.Parameter)], nodes
        )

    def _nodes_behind(self, roots: Sequence[Node], rule: Rule) -> list[Node] | None:
        # Depth first, with an iterator per node of the path: a node that does not belong makes the whole path to it one
        # of others. Nodes beside the path may still be weights, as `w` in `x * tanh(w)`. So each node is looked at once
        # by all searches of a walk, but for those that a later search comes to and that lead to weights alone.
        rejected_nodes = self._rejected_nodes[rule]
        nodes: dict[Node, None] = {}
        path: list[Node] = []
        iterators: list[Iterator[Node]] = [iter(roots)]
        while iterators:
            node = next(iterators[-1], None)
            if node is None:
                iterators.pop()
                del path[-1:]
            elif node in rejected_nodes or not rule(node):
                rejected_nodes.update(path, [node])
                return None
            elif node not in nodes:
                nodes[node] = None
                path.append(node)
                iterators.append(iter([next_node for next_node, _ in node.next_functions if next_node is not None]))
        return list(nodes)


def _plain_weight(node: Node) -> WeightOrigin | None:
    """Return what a parameter as it is or transposed is made of, as most weights are; None for others."""
    nodes = [node]
    if kind_of(node) == TRANSPOSITION:
        nodes += [following for following, _ in node.next_functions if following is not None]
    leaf = leaf_of(nodes[-1]) if kind_of(nodes[-1]) == LEAF else None
    return WeightOrigin([leaf], nodes) if isinstance(leaf, nn.Parameter) else None


def num_multiplications(nodes: Sequence[Node]) -> float:
    """Return how many multiplications take as long as the backward of some nodes; infinite if that is not known."""
    multiplications = 0.0
    for node in nodes:
        kind = kind_of(node)
        if is_function(node) or kind in _PRODUCTS:
            return math.inf
        if kind != LEAF and kind not in VIEWS:
            # The largest gradient that comes to the node or from it counts.
            num_elements = max(metadata_at(edge).shape.numel() for edge in (GradientEdge(node, 0), *_edges(node)))
            multiplications += _MULTIPLICATIONS_PER_ELEMENT * num_elements
    return multiplications


def _keeps_shape(node: Node) -> bool:
    """Whether the output has the shape of an input that needs a gradient: with data it would have a batch's."""
    return metadata_at(GradientEdge(node, 0)).shape in [metadata_at(edge).shape for edge in _edges(node)]


def _edges(node: Node) -> list[GradientEdge]:
    return [GradientEdge(next_node, number) for next_node, number in node.next_functions if next_node is not None]
