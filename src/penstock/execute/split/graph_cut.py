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
    """Places of the whole graph's inputs that it takes; the weight half then takes what the input half adds."""
    outputs: Sequence[int]
    """Places of the whole graph's outputs that it returns; the input half then returns what the weight half needs."""
    extras: Sequence[object]
    """Stand-ins for what goes from one half to the other."""


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A backward in two halves."""

    input_half: Half
    weight_half: Half
    num_multiplications: float
    """Multiplications that the weight half takes."""


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

    def waiting_outputs(self, weight_outputs: Iterable[int]) -> frozenset[int]:
        """Return the places of the outputs that are to wait, of those that are gradients of weights.

        An output waits if some operation that takes time is for waiting outputs alone; the gradient of a bias, for
        example, is a sum over what I computes anyway.
        """
        outputs = frozenset(place for place in weight_outputs if self.outputs[place] is not None)
        while True:
            nodes = self._exclusive_ancestors(outputs)
            costly_outputs = frozenset(
                place for place in outputs if _takes_time(self._ancestors(self.outputs[place]) & nodes)
            )
            if costly_outputs == outputs:
                return outputs
            outputs = costly_outputs

    def cut(self, deferred_outputs: frozenset[int]) -> Cut:
        """Cut off the outputs at these places."""
        early_outputs = [place for place, node in enumerate(self.outputs) if node and place not in deferred_outputs]
        weight_nodes = self._exclusive_ancestors(deferred_outputs)
        extras = self._extras(weight_nodes, [self.outputs[place] for place in sorted(deferred_outputs)])
        return Cut(
            self._half(early_outputs, placeholders=[], extra_results=extras),
            self._half(sorted(deferred_outputs), placeholders=extras, extra_results=[]),
            sum(_multiplications(node) for node in weight_nodes if node.op == "call_function"),
        )

    def _ancestors(self, *results: _Node | None, boundary: Collection[_Node] = ()) -> set[_Node]:
        """Return the nodes that lead to `results`, these included; the walk goes no further than `boundary`."""
        ancestors: set[_Node] = set()
        pending_nodes = [node for node in results if node is not None]
        while pending_nodes:
            node = pending_nodes.pop()
            if node not in ancestors:
                ancestors.add(node)
                pending_nodes.extend(() if node in boundary else node.all_input_nodes)
        return ancestors

    def _exclusive_ancestors(self, deferred_outputs: frozenset[int]) -> set[_Node]:
        """Return the nodes that lead to none but the outputs at these places."""
        input_ancestors = self._ancestors(
            *[node for place, node in enumerate(self.outputs) if place not in deferred_outputs]
        )
        weight_ancestors = self._ancestors(*[self.outputs[place] for place in deferred_outputs]) - input_ancestors
        return {
            node
            for node in weight_ancestors
            if node.op not in ("placeholder", "get_attr")
            # A node that takes one of several results of an early one is early too.
            if not (node.target is operator.getitem and node.args[0] in input_ancestors)
        }

    def _extras(self, weight_nodes: set[_Node], results: Sequence[_Node | None]) -> list[_Node]:
        """Return the nodes whose values the weight half takes from the input half; it makes views and sizes itself."""
        extras: dict[_Node, None] = {}
        visited_nodes = set(weight_nodes)

        def add(node: _Node) -> None:
            if node in visited_nodes or node.op in ("placeholder", "get_attr"):
                return
            visited_nodes.add(node)
            if is_view(node) or not isinstance(node.meta.get("val"), Tensor):
                for input_node in node.all_input_nodes:
                    add(input_node)
            else:
                extras[node] = None

        operands = [input_node for node in self._nodes if node in weight_nodes for input_node in node.all_input_nodes]
        for node in [*operands, *results]:
            if node is not None:
                add(node)
        return list(extras)

    def _half(self, outputs: Sequence[int], placeholders: Sequence[_Node], extra_results: Sequence[_Node]) -> Half:
        """Copy the nodes between the inputs and `placeholders`, which the other half computes, and the results."""
        results = [*[node for place in outputs if (node := self.outputs[place])], *extra_results]
        needed_nodes = self._ancestors(*results, boundary=set(placeholders))
        input_places = [place for place, node in enumerate(self._inputs) if node in needed_nodes]
        graph = fx.Graph()
        copies: dict[_Node, _Node] = {}
        for node in [*[self._inputs[place] for place in input_places], *placeholders]:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for node in self._nodes:
            if node in needed_nodes and node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[result] for result in results))
        graph.output_node().meta = dict(self._module.graph.output_node().meta)
        keep_strides(graph)  # the other half takes them as they are in this graph
        module = fx.GraphModule(self._module, graph)
        module.meta = dict(self._module.meta)
        return Half(module, input_places, outputs, [node.meta["val"] for node in placeholders])


def _takes_time(nodes: Iterable[_Node]) -> bool:
    return any(node.op == "call_function" and _multiplications(node) for node in nodes)


def _multiplications(node: _Node) -> float:
    """Return how many multiplications an operation takes: 0 where compilers fuse it, infinity where it is unknown."""
    target: Any = node.target
    if target in MATRIX_PRODUCTS:
        left_operand: Any = node.args[-2]
        size = node.meta["val"].numel() * left_operand.meta["val"].shape[-1]
        return float(size) if isinstance(size, int) else math.inf
    is_known = getattr(target, "namespace", "") in ("aten", "prims") or target is operator.getitem
    return 0.0 if is_known and target is not CONVOLUTION_BACKWARD and target not in TABLE_GRADIENTS else math.inf


def _separate_convolutions(graph: fx.Graph) -> None:
    """Have a node each compute the gradients of a convolution, in place of one node for all."""
    for node in graph.find_nodes(op="call_function", target=CONVOLUTION_BACKWARD):
        *operands, output_mask = node.args
        for item in list(node.users) if sum(output_mask) > 1 else ():
            with graph.inserting_before(item):
                separate_node = graph.node_copy(node, lambda operand: operand)
            separate_node.args = (*operands, [index == item.args[1] for index in range(len(output_mask))])
            item.args = (separate_node, item.args[1])
        if not node.users:
            graph.erase_node(node)
