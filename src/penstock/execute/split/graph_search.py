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
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from penstock.execute.split.finders import ANYWHERE, BY_KIND, OF_FUNCTIONS, OF_OWN_NODES
from penstock.execute.split.waiting import Finder, Waiting
from penstock.execute.split.weight_graph import WeightGraph
from penstock.execute.undocumented import LEAF, REENTRANT_CHECKPOINT, is_function, kind_of, leaf_of

_MAX_COMMUTING = 2
"""So many gradients have one sum, in whichever order they come."""

Edge = tuple[Node | None, int]


@dataclass(slots=True, eq=False)
class Survey:
    """The findings of a walk through one graph."""

    waiting: list[Waiting] = field(default_factory=list)
    """The weight gradients that wait; none in a graph that is opaque."""
    immediate: dict[Node, Tensor] = field(default_factory=dict)
    """The leaves whose gradients are computed in I, the stage's inputs among them, by their nodes."""
    sizes: dict[int, float] = field(default_factory=dict)
    """Per id of a weight, the multiplications of its gradients as far as they might wait."""
    functions: set[Any] = field(default_factory=set)
    """Custom functions; some may ask which half is wanted."""
    is_opaque: bool = False
    """Whether part of the graph must be run by a backward to all leaves, as reentrant checkpointing must."""


def search(
    edges: Sequence[GradientEdge],
    small: frozenset[int],
    *,
    asking: frozenset[Any] = frozenset(),
    finds_branches: bool = True,
) -> Survey:
    """Walk a graph from the gradients of its outputs to all its leaves.

    `small` are ids of weights that are not to wait, `asking` the custom functions that ask which half is wanted.
    """
    found = _Search(small, WeightGraph(asking), finds_branches=finds_branches)
    found.walk([(edge.node, edge.output_nr) for edge in edges])
    found.settle()
    if not found.survey.is_opaque:
        found.survey.waiting = list(found.waiting.values())
    found.survey.functions = found.graph.functions
    return found.survey


class _Search:
    """A walk through what I computes, which ends at the leaves and at weights whose gradients wait."""

    def __init__(self, small: frozenset[int], graph: WeightGraph, *, finds_branches: bool) -> None:
        self.survey = Survey()
        self.graph = graph
        self.waiting: dict[Node, Waiting] = {}
        self._small = small
        self._finds_branches = finds_branches
        self._seen: set[Node] = set()
        """The nodes that I runs."""
        self._refused: set[Node] = set()
        """Those of which it was found that nothing can wait there after all."""

    def walk(self, edges: list[Edge]) -> None:
        """Walk on from some edges."""
        seen = self._seen
        while edges:
            node, number = edges.pop()
            if node is None or node in seen:
                continue
            found = self.waiting.get(node) or self._find(node)
            if found is None:
                seen.add(node)
                edges.extend(node.next_functions)
                continue
            found.arrive(number)
            if not found.is_entry:
                seen.add(node)
                edges.extend([each for place, each in enumerate(node.next_functions) if place not in found.places])

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
            for each in conflicts:
                del self.waiting[each.node]
                self._refused.add(each.node)
                self._seen.discard(each.node)
            self.walk([(each.node, 0) for each in conflicts])

    def _find(self, node: Node) -> Waiting | None:
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
        if self._finds_branches and (found := self._ask(ANYWHERE, node)) is not None:
            return found
        find = BY_KIND.get(kind) or (OF_FUNCTIONS if is_function(node) else None)
        return None if find is None else self._ask(find, node)

    def _ask(self, find: Finder, node: Node) -> Waiting | None:
        found = find(node, self.graph)
        if found is None:
            return None
        ids, sizes = [id(parameter) for parameter in found.parameters], self.survey.sizes
        for key in ids:
            sizes[key] = sizes.get(key, 0.0) + found.num_multiplications
        if not found.can_wait or not self._small.isdisjoint(ids):
            return None
        self.waiting[node] = found
        return found

    def _conflicts(self) -> list[Waiting]:
        every = list(self.waiting.values())
        shared, hands_over = self._shared(every), any(each.is_entry for each in every)
        return [each for each in every if self._is_in_conflict(each, shared, hands_over=hands_over)]

    def _is_in_conflict(self, each: Waiting, shared: set[Node], *, hands_over: bool) -> bool:
        nodes = each.made_of.nodes
        if not self._seen.isdisjoint(nodes) or not shared.isdisjoint(nodes):
            return True
        if hands_over and each.is_read_in_turn and each.ends(hands_over=True):
            return True  # its gradient would be handed over when all of I is over
        return each.is_entry and (each.node in shared or not each.is_complete)

    def _shared(self, every: Sequence[Waiting]) -> set[Node]:
        """Return entries that lie within what else waits, and nodes whose gradients would be added up otherwise.

        A node gets gradients from what waits first and then from other nodes; in a whole backward they may come in
        turn. Two gradients have one sum, whichever comes first; three have not. So beside `x @ w`, which adds one
        gradient, `w.pow(2)` waits and `w * w`, which leads to w twice, does not.
        """
        used = [id(parameter) for each in every for parameter in each.parameters]
        if len(set(used)) == len(used):
            return set()
        nodes = {node for each in every for node in each.made_of.nodes}
        first = Counter(root.node for each in every for root in each.roots)
        then = Counter(following for node in nodes for following, _ in node.next_functions)
        found = {node for node in first if then[node] and first[node] + then[node] > _MAX_COMMUTING}
        return found | {each.node for each in every if each.is_entry and each.node in nodes}
