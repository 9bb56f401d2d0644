"""Walks the graph of a forward for weight gradients that can wait for W.

    loss <- Add <- Mm <- Gelu <- Addmm <- ... <- Mul <- input      what I goes through
                   |             |    |          |
                   T             T    bias       Tanh              W waits; biases do not
                   |             |               |
                   W1            W2              W3

At each node that I comes to, the finders are asked what can wait there; the walk ends there, or goes on past the
weights. Its other ends are the leaves whose gradients are computed in I.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from penstock.execute.split.deferred_node import DeferredNode, Finder
from penstock.execute.split.finders import ANYWHERE, BY_KIND, OF_FUNCTIONS, OF_OWN_NODES
from penstock.execute.split.weight_graph import WeightGraph
from penstock.execute.undocumented import LEAF, REENTRANT_CHECKPOINT, is_function, kind_of, leaf_of

_MAX_COMMUTING = 2
"""The sum of so many gradients does not depend on their order."""

Edge = tuple[Node | None, int]


@dataclass(slots=True, eq=False)
class Survey:
    """The findings of a walk through one graph."""

    deferred_nodes: list[DeferredNode] = field(default_factory=list)
    """The nodes whose weight gradients wait; none in a graph that is opaque."""
    immediate: dict[Node, Tensor] = field(default_factory=dict)
    """The leaves whose gradients are computed in I, the stage's inputs among them, by their nodes."""
    sizes: dict[int, float] = field(default_factory=dict)
    """Multiplications of a weight's gradients that might wait, by the id of the weight."""
    functions: set[Any] = field(default_factory=set)
    """Custom functions; some may ask which half is wanted."""
    is_opaque: bool = False
    """Whether part of the graph must be run by a backward to all leaves, as reentrant checkpointing must."""


def search(
    edges: Sequence[GradientEdge],
    small_weights: frozenset[int],
    *,
    asking_functions: frozenset[Any] = frozenset(),
    finds_branches: bool = True,
) -> Survey:
    """Walk a graph from the gradients of its outputs to all its leaves.

    `small_weights` are ids of weights that are not to wait, `asking_functions` the custom functions that ask which half
    is wanted.
    """
    graph_search = _Search(small_weights, WeightGraph(asking_functions), finds_branches=finds_branches)
    graph_search.walk([(edge.node, edge.output_nr) for edge in edges])
    graph_search.settle()
    survey = graph_search.survey
    if not survey.is_opaque:
        survey.deferred_nodes = list(graph_search.deferred_nodes.values())
    survey.functions = graph_search.graph.functions
    return survey


class _Search:
    """A walk through what I computes, which ends at the leaves and at weights whose gradients wait."""

    def __init__(self, small_weights: frozenset[int], graph: WeightGraph, *, finds_branches: bool) -> None:
        self.survey = Survey()
        self.graph = graph
        self.deferred_nodes: dict[Node, DeferredNode] = {}
        self._small = small_weights
        self._finds_branches = finds_branches
        self._visited_nodes: set[Node] = set()
        """The nodes that I runs."""
        self._refused: set[Node] = set()
        """The nodes at which nothing can wait after all, because of a conflict."""

    def walk(self, edges: list[Edge]) -> None:
        """Walk on from some edges."""
        visited_nodes = self._visited_nodes
        while edges:
            node, number = edges.pop()
            if node is None or node in visited_nodes:
                continue
            deferred_node = self.deferred_nodes.get(node) or self._find(node)
            if deferred_node is None:
                visited_nodes.add(node)
                edges.extend(node.next_functions)
                continue
            deferred_node.arrive(number)
            if not deferred_node.is_branch_entry:
                visited_nodes.add(node)
                weight_places = deferred_node.places
                edges.extend([edge for place, edge in enumerate(node.next_functions) if place not in weight_places])

    def settle(self) -> None:
        """Have nothing wait that leads to where I comes too, and nothing whose sums W would add up in another order.

        A node between a weight and its parameters may be one that I runs, such as a product of another weight and
        inputs without gradient: it runs only once.
        """
        # To refuse one thing has the walk go on into its weights, to where another one's weights may lead to as well.
        # So this goes on until nothing is in conflict. It ends, since a node is refused once and never asked about
        # again. The result is right: I runs no node between a weight that waits and its parameters, so each of these
        # nodes runs once, in W, where each of these parameters gets all of its gradient. A parameter that two things
        # lead to waits for both or for neither: to refuse one puts its nodes among those that I runs.
        while conflicts := self._conflicts():
            for deferred_node in conflicts:
                del self.deferred_nodes[deferred_node.node]
                self._refused.add(deferred_node.node)
                self._visited_nodes.discard(deferred_node.node)
            self.walk([(deferred_node.node, 0) for deferred_node in conflicts])

    def _find(self, node: Node) -> DeferredNode | None:
        """Ask the finders what can wait at a node, if anything."""
        kind = kind_of(node)
        if kind == LEAF:
            self.survey.immediate[node] = leaf_of(node)
            return None
        if kind == REENTRANT_CHECKPOINT:
            self.survey.is_opaque = True
        if node in self._refused:
            return None
        if (find := OF_OWN_NODES.get(kind)) is not None:
            return self._ask(find, node)
        if self._finds_branches and (branch := self._ask(ANYWHERE, node)) is not None:
            return branch
        find = BY_KIND.get(kind) or (OF_FUNCTIONS if is_function(node) else None)
        return None if find is None else self._ask(find, node)

    def _ask(self, find: Finder, node: Node) -> DeferredNode | None:
        deferred_node = find(node, self.graph)
        if deferred_node is None:
            return None
        param_ids, sizes = [id(parameter) for parameter in deferred_node.parameters], self.survey.sizes
        for param_id in param_ids:
            sizes[param_id] = sizes.get(param_id, 0.0) + deferred_node.num_multiplications
        if not deferred_node.can_wait or not self._small.isdisjoint(param_ids):
            return None
        self.deferred_nodes[node] = deferred_node
        return deferred_node

    def _conflicts(self) -> list[DeferredNode]:
        deferred_nodes = list(self.deferred_nodes.values())
        shared_nodes = self._shared_nodes(deferred_nodes)
        captures = any(deferred_node.is_branch_entry for deferred_node in deferred_nodes)
        is_in_conflict = partial(self._is_in_conflict, shared_nodes=shared_nodes, captures_gradients=captures)
        return list(filter(is_in_conflict, deferred_nodes))

    def _is_in_conflict(self, deferred_node: DeferredNode, shared_nodes: set[Node], captures_gradients: bool) -> bool:
        nodes = deferred_node.origin.nodes
        if not self._visited_nodes.isdisjoint(nodes) or not shared_nodes.isdisjoint(nodes):
            return True
        if captures_gradients and deferred_node.is_read_in_turn and deferred_node.target_edges(captures_gradients=True):
            return True  # its gradient would be captured only when all of I is over
        return deferred_node.is_branch_entry and (deferred_node.node in shared_nodes or not deferred_node.is_complete)

    def _shared_nodes(self, deferred_nodes: Sequence[DeferredNode]) -> set[Node]:
        """Return entries that lie within what else waits, and nodes whose gradients would be added up otherwise.

        A node gets gradients from what waits first and then from other nodes; in a whole backward they may come in
        turn. Two gradients have one sum, whichever comes first; three have not. So beside `x @ w`, which adds one
        gradient, `w.pow(2)` waits and `w * w`, which leads to w twice, does not.
        """
        param_ids = [id(parameter) for deferred_node in deferred_nodes for parameter in deferred_node.parameters]
        if len(set(param_ids)) == len(param_ids):
            return set()
        nodes = {node for deferred_node in deferred_nodes for node in deferred_node.origin.nodes}
        # A node gets one gradient for each root there, and one for each inner edge to it.
        num_roots = Counter(root.node for deferred_node in deferred_nodes for root in deferred_node.roots)
        num_inner = Counter(next_node for node in nodes for next_node, _ in node.next_functions)
        reordered = {
            node for node in num_roots if num_inner[node] and num_roots[node] + num_inner[node] > _MAX_COMMUTING
        }
        entries = {deferred_node.node for deferred_node in deferred_nodes if deferred_node.is_branch_entry}
        return reordered | (entries & nodes)
