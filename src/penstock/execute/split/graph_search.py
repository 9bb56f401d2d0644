"""Searches the graph of a forward for weight gradients that can be deferred.

    loss <- Add <- Mm <- Gelu <- Addmm <- ... <- Mul <- input      what I goes through
                   |             |    |          |
                   T             T    bias       Tanh              W waits; vectors do not
                   |             |               |
                   W1            W2              W3

Weight gradients wait behind products, behind custom functions that ask which half is wanted, and in branches that are
made of parameters alone. They can be deferred if I runs nothing else that leads to the same parameters: then one
gradient comes of them, at one moment.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from penstock.execute.split.compiled_block import read_compiled_block
from penstock.execute.split.custom_function import CustomFunction
from penstock.execute.split.deferred import Deferred, DeferredNode, Rung
from penstock.execute.split.products import NODES
from penstock.execute.split.weight_branch import WeightBranch
from penstock.execute.split.weight_grad_mode import SPLIT_PRODUCT, read_split_product
from penstock.execute.split.weight_graph import find_parameters, has_constants, makes_weights, num_multiplications
from penstock.execute.undocumented import (
    HOOKED_MODULE,
    LEAF,
    REENTRANT_CHECKPOINT,
    TRANSPOSITION,
    function_of,
    is_any_hooked,
    is_function,
    kind_of,
    leaf_of,
    runs_once,
)
from penstock.execute.undocumented_compiler import COMPILED

_READERS: dict[str, Callable[[Node], DeferredNode | None]] = NODES | {
    SPLIT_PRODUCT: read_split_product,
    COMPILED: read_compiled_block,
}
_NEVER_ENTERED = frozenset({LEAF, SPLIT_PRODUCT, COMPILED, HOOKED_MODULE, REENTRANT_CHECKPOINT})
"""Kinds that W cannot run by themselves: some have hooks that only a backward runs."""
_PLAIN = frozenset({LEAF, TRANSPOSITION})
"""Kinds of nodes that cost W nothing."""
_MAX_COMMUTING = 2
"""So many gradients have one sum, in whichever order they come."""

Edge = tuple[Node | None, int]


@dataclass(slots=True, eq=False)
class Survey:
    """What a graph consists of, as far as splitting its backward goes."""

    deferred: list[DeferredNode] = field(default_factory=list)
    """The nodes whose weight gradients are deferred, entries of branches apart."""
    branches: list[WeightBranch] = field(default_factory=list)
    """Those that are deferred."""
    immediate: dict[Node, Tensor] = field(default_factory=dict)
    """The leaves whose gradients are computed in I, the stage's inputs among them, by their nodes."""
    sizes: dict[int, float] = field(default_factory=dict)
    """Per id of a weight, the multiplications of its gradients as far as they might be deferred."""
    hooked: set[int] = field(default_factory=set)
    """Ids of weights whose products keep their activations elsewhere, such as under checkpointing."""
    functions: set[Any] = field(default_factory=set)
    """Custom functions; some may ask which half is wanted."""
    is_opaque: bool = False
    """Whether part of the graph must be run by a backward to all leaves, as reentrant checkpointing must."""

    def rungs(self) -> dict[int, Rung]:
        """Return by what each deferred weight waits, by id."""
        every: list[Deferred] = [*self.deferred, *self.branches]
        return {id(parameter): each.rung for each in every for parameter in each.parameters}


def search(
    edges: Sequence[GradientEdge],
    small: frozenset[int],
    *,
    asking: frozenset[Any] = frozenset(),
    finds_branches: bool = True,
) -> Survey:
    """Walk a graph from the gradients of its outputs to all its leaves.

    `small` are ids of weights not to defer, `asking` the custom functions that ask which half is wanted.
    """
    found = _Search(small, asking, finds_branches=finds_branches)
    found.walk([(edge.node, edge.output_nr) for edge in edges])
    found.settle()
    found.survey.branches = list(found.branches.values())
    return found.survey


class _Search:
    """A walk through what I computes, which ends at the leaves and at weights whose gradients are deferred."""

    def __init__(self, small: frozenset[int], asking: frozenset[Any], *, finds_branches: bool) -> None:
        self.survey = Survey()
        self.branches: dict[Node, WeightBranch] = {}
        """By their entries."""
        self._small = small
        self._asking = asking
        self._finds_branches = finds_branches
        self._seen: set[Node] = set()
        self._refused: set[Node] = set()
        """Entries of branches that are not deferred."""
        self._leading_to: dict[Deferred, Sequence[Node]] = {}
        """Per thing that may be deferred, the nodes from its weights to their parameters, both included."""
        self._not_weights: set[Node] = set()
        """Nodes that are known to lead to more than parameters."""
        self._not_branches: set[Node] = set()
        """The same, for what may meet data in a branch."""

    def walk(self, waiting: list[Edge]) -> None:
        """Walk on from some edges."""
        seen = self._seen
        while waiting:
            node, number = waiting.pop()
            if node is None or node in seen:
                continue
            if self._finds_branches and (node in self.branches or self._enters(node)):
                self.branches[node].add_output(number)
                continue
            seen.add(node)
            kind = kind_of(node)
            if kind == LEAF:
                self.survey.immediate[node] = leaf_of(node)
                continue
            if (reader := _READERS.get(kind)) is not None:
                product = reader(node)
            else:
                product = self._read_function(node, kind) if is_function(node) else None
            if product is None or not self._may_defer(product):
                waiting.extend(node.next_functions)
                continue
            self.survey.deferred.append(product)
            places = product.places
            waiting.extend([each for place, each in enumerate(node.next_functions) if place not in places])

    def settle(self) -> None:
        """Defer nothing that leads to where I comes too, and nothing whose sums W would add up in another order.

        A node between a weight and its parameters may be one that I runs, such as a product of another weight and
        inputs without gradient: it runs only once.
        """
        # Until nothing changes: to walk on from one product may lead to the weight of another.
        while conflicts := self._conflicts():
            self.survey.deferred = [each for each in self.survey.deferred if each not in conflicts]
            for each in conflicts:
                if isinstance(each, WeightBranch):
                    self._refused.add(each.node)
                    del self.branches[each.node]
                    self.walk([(each.node, 0)])
                else:
                    self.walk([(root.node, root.output_nr) for root in each.roots])

    def _read_function(self, node: Node, kind: str) -> DeferredNode | None:
        self.survey.is_opaque |= kind == REENTRANT_CHECKPOINT
        function = function_of(node)
        self.survey.functions.add(function)
        if function not in self._asking or runs_once(function) or is_any_hooked(node):
            return None
        following = enumerate(node.next_functions)
        needed = [(place, each) for place, (each, _) in following if each is not None]
        places = [place for place, each in needed if find_parameters([each], self._not_weights) is not None]
        return CustomFunction(node, places) if 0 < len(places) < len(needed) else None

    def _may_defer(self, product: DeferredNode) -> bool:
        found = find_parameters([root.node for root in product.roots], self._not_weights)
        if found is None:
            return False
        product.parameters, nodes = found
        # What it takes to lead the gradient on through other nodes is not known.
        is_plain = _PLAIN.issuperset(map(kind_of, nodes))
        ids = self._note_size(product, product.num_multiplications if is_plain else math.inf)
        if product.rung is Rung.PRODUCT and not is_plain:
            product.rung = Rung.BRANCH
        if not self._small.isdisjoint(ids):
            return False
        if product.is_hooked:
            self.survey.hooked.update(ids)
            return False
        self._leading_to[product] = nodes
        return True

    def _enters(self, node: Node) -> bool:
        """Whether a branch begins at a node that I comes to, and is to be deferred."""
        kind = kind_of(node)
        if kind in _NEVER_ENTERED or node in self._refused:
            return False
        roots, rung = [node], Rung.BRANCH
        if is_function(node) and has_constants(node):
            # Data may come to it. Weights are all that it leads to, but its backward may be more than a formula.
            self.survey.functions.add(function_of(node))
            if function_of(node) not in self._asking:
                return False
            roots, rung = [each for each, _ in node.next_functions if each is not None], Rung.FUNCTION
        found = find_parameters(roots, self._not_branches, makes_weights)
        if found is None:
            return False
        inner = [each for each in found[1] if each is not node]
        branch = WeightBranch(node, found[0], inner, num_multiplications([node, *inner]), rung)
        if branch.num_multiplications == 0 or not all(map(_can_wait, (node, *inner))):
            return False
        if not self._small.isdisjoint(self._note_size(branch, branch.num_multiplications)):
            return False
        self.branches[node] = branch
        self._leading_to[branch] = inner
        return True

    def _note_size(self, deferred: Deferred, size: float) -> list[int]:
        ids = [id(parameter) for parameter in deferred.parameters]
        for key in ids:
            self.survey.sizes[key] = self.survey.sizes.get(key, 0.0) + size
        return ids

    def _conflicts(self) -> list[Deferred]:
        every: list[Deferred] = [*self.survey.deferred, *self.branches.values()]
        shared = self._shared(every)
        return [each for each in every if self._is_in_conflict(each, shared)]

    def _is_in_conflict(self, each: Deferred, shared: set[Node]) -> bool:
        leading = self._leading_to[each]
        if not self._seen.isdisjoint(leading) or not shared.isdisjoint(leading):
            return True
        return isinstance(each, WeightBranch) and (each.node in shared or not each.is_complete)

    def _shared(self, every: Iterable[Deferred]) -> set[Node]:
        """Return entries that lie within what else is deferred, and nodes whose gradients would be added up otherwise.

        A node gets gradients from what is deferred first and then from other nodes; in a whole backward they may come
        in turn.
        """
        used = [id(parameter) for each in every for parameter in each.parameters]
        if len(set(used)) == len(used):
            return set()
        nodes = {node for each in every for node in self._leading_to[each]}
        first = Counter(root.node for each in every for root in each.roots)
        then = Counter(following for node in nodes for following, _ in node.next_functions)
        found = {node for node in first if then[node] and first[node] + then[node] > _MAX_COMMUTING}
        return found | (nodes & self.branches.keys())


def _can_wait(node: Node) -> bool:
    return not is_any_hooked(node) and not (is_function(node) and runs_once(function_of(node)))
