"""Cuts the graph of a compiled backward in two: the gradients that I needs, and those of weights, which wait for W.

    saved, gradients of the outputs ──► input half ──► gradients of inputs, biases, norms
                   │                        │ what W needs besides
                   └────────────────────────┴──► weight half ──► gradients of weights

Each operation is in one of the halves, so nothing is computed twice, in the order of the whole graph. Only views and
sizes may be in both: they cost nothing, and W then keeps what they are views of.
"""

import math
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from penstock.execute.undocumented_compiler import (
    CONVOLUTION_BACKWARD,
    MATRIX_PRODUCTS,
    TABLE_GRADIENTS,
    is_view,
    keep_strides,
)

_Node = fx.Node


@dataclass(frozen=True, slots=True, eq=False)
class Half:
    """One half of a backward."""

    module: fx.GraphModule
    inputs: Sequence[int]
    """Which inputs of the whole graph it takes; behind them, the weight half takes what the input half adds."""
    outputs: Sequence[int]
    """Which outputs of the whole graph it returns; behind them, the input half returns what the weight half needs."""
    extras: Sequence[object]
    """Stand-ins for what goes from one half to the other."""


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A backward in two halves."""

    input_half: Half
    weight_half: Half
    num_multiplications: float
    """Of the weight half."""


class BackwardGraph:
    """The graph of one compiled backward."""

    def __init__(self, module: fx.GraphModule) -> None:
        _separate_convolutions(module.graph)
        self._module = module
        self._nodes = list(module.graph.nodes)
        self._inputs = [node for node in self._nodes if node.op == "placeholder"]
        self.outputs: Sequence[_Node | None] = list(module.graph.output_node().args[0])  # type: ignore[arg-type]

    def trouble(self) -> str:
        """Say why the graph cannot be cut; empty where it can."""
        for node in self._nodes:
            if node.op not in ("placeholder", "output") and node.is_impure():
                return f"{node.target} changes a tensor in place, or draws random numbers"
        return ""

    def waiting(self, weights: Iterable[int]) -> frozenset[int]:
        """Return which outputs are to wait, of those that are gradients of weights.

        Those of which some operation that takes time is for them alone; a bias, for example, takes a sum over what I
        goes through anyway.
        """
        found = frozenset(place for place in weights if self.outputs[place] is not None)
        while True:
            alone = self._alone(found)
            kept = frozenset(place for place in found if _takes_time(self._before(self.outputs[place]) & alone))
            if kept == found:
                return found
            found = kept

    def cut(self, waiting: frozenset[int]) -> Cut:
        """Cut off the outputs at these places."""
        immediate = [place for place, node in enumerate(self.outputs) if node is not None and place not in waiting]
        late = self._alone(waiting)
        extras = self._extras(late, [self.outputs[place] for place in sorted(waiting)])
        return Cut(
            self._half(immediate, taken=[], given=extras),
            self._half(sorted(waiting), taken=extras, given=[]),
            sum(_multiplications(node) for node in late if node.op == "call_function"),
        )

    def _before(self, *ends: _Node | None, without: Collection[_Node] = ()) -> set[_Node]:
        """All nodes that lead to some nodes, these included; none that leads to those `without`, but these."""
        found: set[_Node] = set()
        waiting = [node for node in ends if node is not None]
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting.extend(() if node in without else node.all_input_nodes)
        return found

    def _alone(self, waiting: frozenset[int]) -> set[_Node]:
        """The nodes that lead to none but the outputs at these places."""
        early = self._before(*[node for place, node in enumerate(self.outputs) if place not in waiting])
        late = self._before(*[self.outputs[place] for place in waiting]) - early
        return {node for node in late if node.op not in ("placeholder", "get_attr") and not _is_item_of(node, early)}

    def _extras(self, late: set[_Node], results: Sequence[_Node | None]) -> list[_Node]:
        """Return what the weight half takes from the input half; of views and sizes it makes its own."""
        extras: dict[_Node, None] = {}
        seen = set(late)

        def add(node: _Node) -> None:
            if node in seen or node.op in ("placeholder", "get_attr"):
                return
            seen.add(node)
            if is_view(node) or not isinstance(node.meta.get("val"), Tensor):
                for each in node.all_input_nodes:
                    add(each)
            else:
                extras[node] = None

        taken = [each for node in self._nodes if node in late for each in node.all_input_nodes]
        for node in [*taken, *results]:
            if node is not None:
                add(node)
        return list(extras)

    def _half(self, outputs: Sequence[int], taken: Sequence[_Node], given: Sequence[_Node]) -> Half:
        """Copy what leads from the inputs, and from what it takes of the other half, to its results."""
        results = [*[node for place in outputs if (node := self.outputs[place])], *given]
        needed = self._before(*results, without=set(taken))
        inputs = [place for place, node in enumerate(self._inputs) if node in needed]
        graph = fx.Graph()
        copies: dict[_Node, _Node] = {}
        for node in [*[self._inputs[place] for place in inputs], *taken]:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for node in self._nodes:
            if node in needed and node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[each] for each in results))
        graph.output_node().meta = dict(self._module.graph.output_node().meta)
        keep_strides(graph)  # the other half takes them as they are in this graph
        module = fx.GraphModule(self._module, graph)
        module.meta = dict(self._module.meta)
        return Half(module, inputs, outputs, [node.meta["val"] for node in taken])


def _is_item_of(node: _Node, early: set[_Node]) -> bool:
    """Whether a node takes one of several results of an early one, and so is early too."""
    return node.target is operator.getitem and node.args[0] in early


def _takes_time(nodes: Iterable[_Node]) -> bool:
    return any(node.op == "call_function" and _multiplications(node) for node in nodes)


def _multiplications(node: _Node) -> float:
    """How many an operation takes: 0 for what compilers fuse with others, infinity for what is not known."""
    target: Any = node.target
    if target in MATRIX_PRODUCTS:
        left: Any = node.args[-2]
        size = node.meta["val"].numel() * left.meta["val"].shape[-1]
        return float(size) if isinstance(size, int) else math.inf
    is_known = getattr(target, "namespace", "") in ("aten", "prims") or target is operator.getitem
    return 0.0 if is_known and target is not CONVOLUTION_BACKWARD and target not in TABLE_GRADIENTS else math.inf


def _separate_convolutions(graph: fx.Graph) -> None:
    """Have a node each compute the gradients of a convolution, in place of one node for all."""
    for node in graph.find_nodes(op="call_function", target=CONVOLUTION_BACKWARD):
        *others, wanted = node.args
        for item in list(node.users) if sum(wanted) > 1 else ():
            with graph.inserting_before(item):
                own = graph.node_copy(node, lambda each: each)
            own.args = (*others, [place == item.args[1] for place in range(len(wanted))])
            item.args = (own, item.args[1])
        if not node.users:
            graph.erase_node(node)
