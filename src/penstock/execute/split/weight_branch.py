"""A branch of the graph that computes weights and meets the activations at its entry; its backward waits for W.

    I   autograd hands over the gradient that arrives at the entry and stops there
    W   the entry runs by itself, the rest of the branch in autograd's backward

Hooks of the tensor at the entry see the gradient in I. In W the entry must not run in a backward: they would see it a
second time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from penstock.execute.split.deferred_node import DeferredNode, fitted
from penstock.execute.split.wanted import BackwardHalf, want
from penstock.execute.split.weight_graph import (
    WeightGraph,
    WeightOrigin,
    has_constants,
    makes_weights,
    num_multiplications,
    open_places,
)
from penstock.execute.undocumented import (
    HOOKED_MODULE,
    REENTRANT_CHECKPOINT,
    function_of,
    is_any_saved_elsewhere,
    is_function,
    kind_of,
    metadata_at,
    num_outputs,
    run_node,
    runs_once,
    saved_tensors,
)

_NEVER_ENTERED = frozenset({HOOKED_MODULE, REENTRANT_CHECKPOINT})
"""Kinds that W cannot run by themselves: some have hooks that only a backward runs."""


def find_branch(node: Node, graph: WeightGraph) -> "WeightBranch | None":
    """Find a branch that begins at a node; None, too, where it is views alone, which take no time."""
    if kind_of(node) in _NEVER_ENTERED:
        return None
    meets_data = is_function(node) and has_constants(node)
    if meets_data and not graph.runs_in_parts(node):
        return None  # data may come to it, and its backward may be more than a formula
    places = open_places(node)
    origin = graph.origin_at(node, places, makes_weights) if meets_data else graph.origin_behind([node], makes_weights)
    if origin is None:
        return None
    inner_nodes = [inner_node for inner_node in origin.nodes if inner_node is not node]
    multiplications = num_multiplications([node, *inner_nodes])
    if multiplications == 0 or not all(map(_can_wait, (node, *inner_nodes))):
        return None
    mechanism = "custom function" if meets_data else "weight branch"
    return WeightBranch(node, WeightOrigin(origin.parameters, inner_nodes), places, mechanism, multiplications)


@dataclass(slots=True, eq=False)
class WeightBranch(DeferredNode):
    """A branch, entered at `node` from others that I runs; `origin` has the nodes behind it."""

    outputs: list[int] = field(default_factory=list)
    """Indices of the entry's outputs that nodes outside the branch use."""

    is_branch_entry = True

    @property
    def is_complete(self) -> bool:
        """Whether a gradient comes to each output; a function in Python may expect that."""
        return not is_function(self.node) or len(self.outputs) == num_outputs(self.node)

    def held_values(self) -> Iterable[Any]:
        """Return the gradients, and what the branch has saved in the forward."""
        if not self.operands:
            return []
        return [
            *self.operands,
            *(tensor for node in (self.node, *self.origin.nodes) for tensor in saved_tensors(node)),
        ]

    def arrive(self, number: int) -> None:
        if number not in self.outputs:
            self.outputs.append(number)

    def target_edges(self, *, captures_gradients: bool) -> Sequence[GradientEdge]:
        """Return the outputs of the entry that others use."""
        return [GradientEdge(self.node, number) for number in self.outputs]

    def keep(self, gradients: Sequence[Tensor | None]) -> None:
        """Keep the gradients of `target_edges`."""
        gradient_by_output = dict(zip(self.outputs, gradients, strict=True))
        self.hold([gradient_by_output.get(number) for number in range(num_outputs(self.node))], unchanging=())

    def release(self) -> None:
        """Forget the node if no gradient has come; otherwise W needs it, and holds nothing that leads to it by that."""
        if not self.operands:
            self._forget()

    def gradients(self) -> Sequence[Tensor | None]:
        """Run the entry, and forget it."""
        node, gradients = self.node, self.operands
        self._forget()
        if is_function(node):
            want(node, BackwardHalf.WEIGHT)
            gradients = [
                _zeros(node, number) if gradient is None else gradient for number, gradient in enumerate(gradients)
            ]
        results = run_node(node, gradients, self.places)
        return [fitted(gradient, root) for gradient, root in zip(results, self.roots, strict=True)]

    def _forget(self) -> None:
        self.node, self.operands, self.origin = None, (), WeightOrigin(self.parameters, ())


def _can_wait(node: Node) -> bool:
    return not is_any_saved_elsewhere(node) and not (is_function(node) and runs_once(function_of(node)))


def _zeros(node: Node, number: int) -> Tensor:
    expected = metadata_at(GradientEdge(node, number))
    return torch.zeros(expected.shape, dtype=expected.dtype, device=expected.device)
