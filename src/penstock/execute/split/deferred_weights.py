"""`DeferredWeights`: what one forward leaves for the two parts of a split backward.

    I   a backward to all leaves but the weights that wait; of these, what W needs is kept
    W   the weight gradients from what was kept

I computes exactly what it is told to, by `inputs` of autograd's backward, so the forward is one like any other. It
frees the graph as it goes, but for the few nodes that lead to weights that wait.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

from penstock.execute.parameters.gradient_store import WeightEntry, WeightInputs
from penstock.execute.split.deferred_node import DeferredNode
from penstock.execute.split.graph_search import Survey
from penstock.execute.undocumented import has_hooks, nodes_in_python_stay, order_of, run_node

Search = Callable[[Sequence[GradientEdge]], Survey]
"""Surveys the graph behind the edges where a backward begins."""


class DeferredWeights:
    """The weight gradients of one forward that are left to W."""

    def __init__(self, search: Search | None) -> None:
        """`search` finds what can wait, if anything."""
        self.entries: list[WeightEntry] = []
        """Entries for W, in the order in which a whole backward would come to them. I fills it, and layers add
        functions of their own."""
        self._leaves: list[Tensor] = []
        self._graph: list[GradientEdge] = []
        """The edges that W has to hold where nodes in Python do not stay by themselves."""
        self._search = search

    def take_leaves(self) -> list[Tensor]:
        """Return the leaves that I has come to, the stage's inputs among them, and forget them.

        None where the graph was not searched: then W holds nothing with which a gradient could share memory.
        """
        leaves, self._leaves = self._leaves, []
        return leaves

    def take_weight_inputs(self) -> WeightInputs:
        """Return what I has left for W, and keep it no longer."""
        entries, self.entries = self.entries, []
        return WeightInputs(entries)

    def backward_input(
        self,
        edges: Sequence[GradientEdge],
        gradients: Sequence[Tensor],
        separate_first_gradients: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Run I from some edges, as `torch.autograd.backward` runs a whole backward.

        Within `separate_first_gradients` first gradients share no memory with what is kept for W: a backward that a
        node in Python runs may add to them before I is over.
        """
        if not nodes_in_python_stay():
            self._graph += edges
        survey = Survey() if self._search is None else self._search(edges)
        self._leaves += survey.immediate.values()
        runs_python = survey.functions or survey.is_opaque
        separation = separate_first_gradients() if runs_python else nullcontext()
        if not survey.deferred_nodes:
            with separation, NestedBackwards(self.backward_input) if survey.is_opaque else nullcontext():
                torch.autograd.backward(edges, gradients)
        elif any(deferred_node.is_branch_entry for deferred_node in survey.deferred_nodes):
            self.entries += _backward_that_captures(edges, gradients, survey, separation)
        else:
            self.entries += _backward_to_chosen_leaves(edges, gradients, survey, separation)


def _backward_to_chosen_leaves(
    edges: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    survey: Survey,
    separation: AbstractContextManager[None],
) -> list[DeferredNode]:
    """Run a backward to the leaves of I; return the deferred nodes that it has come to, in that order."""
    target_edges = [node.target_edges(captures_gradients=False) for node in survey.deferred_nodes]
    inputs: list[Any] = [*_leaf_edges(survey), *chain.from_iterable(target_edges)]
    with _watching(survey.deferred_nodes) as reached_nodes, separation:
        torch.autograd.backward(edges, gradients, inputs=inputs)
    return reached_nodes


def _backward_that_captures(
    edges: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    survey: Survey,
    separation: AbstractContextManager[None],
) -> list[DeferredNode]:
    """Run a backward that stops at branches and returns their gradients; return the deferred nodes with a gradient.

    `torch.autograd.grad` returns the gradients of leaves too, which this adds to those of the leaves.
    """
    deferred_nodes = survey.deferred_nodes
    target_edges = [node.target_edges(captures_gradients=True) for node in deferred_nodes]
    inputs = [*_leaf_edges(survey), *chain.from_iterable(target_edges)]
    orders = {id(deferred_node): order_of(deferred_node.node) for deferred_node in deferred_nodes}
    with _watching(deferred_nodes) as reached_nodes, separation:
        captured = iter(torch.autograd.grad(edges, inputs, gradients, allow_unused=True))
        _accumulate([(leaf, node, next(captured)) for node, leaf in survey.immediate.items()])
        reached_nodes += _keep_captured(
            zip(deferred_nodes, [[next(captured) for _ in node_edges] for node_edges in target_edges], strict=True)
        )
    # Captured gradients come after all others. A whole backward runs nodes by their order, the highest first: W adds up
    # its gradients in that order.
    return sorted(reached_nodes, key=lambda node: orders[id(node)], reverse=True)


def _leaf_edges(survey: Survey) -> list[GradientEdge]:
    return [GradientEdge(node, 0) for node in survey.immediate]


@contextmanager
def _watching(deferred_nodes: Sequence[DeferredNode]) -> Iterator[list[DeferredNode]]:
    """Yield a list to which each deferred node adds itself when the backward comes to it; release all of them after."""
    reached_nodes: list[DeferredNode] = []
    for deferred_node in deferred_nodes:
        deferred_node.watch(reached_nodes)
    try:
        yield reached_nodes
    finally:
        for deferred_node in deferred_nodes:
            deferred_node.release()


def _keep_captured(
    captured_gradients: Iterable[tuple[DeferredNode, Sequence[Tensor | None]]],
) -> Iterator[DeferredNode]:
    """Have deferred nodes keep the gradients that a backward has captured for them; yield those that got any."""
    for deferred_node, gradients in captured_gradients:
        if any(gradient is not None for gradient in gradients):
            deferred_node.keep(gradients)
            yield deferred_node


def _accumulate(captured_gradients: Sequence[tuple[Tensor, Node, Tensor | None]]) -> None:
    """Add captured gradients to those of leaves; each comes with the leaf and its node, None where none came."""
    edges: list[Any] = []
    gradients: list[Tensor] = []
    for leaf, node, gradient in captured_gradients:
        if gradient is None:
            continue
        if has_hooks(leaf):  # its hooks have seen the gradient when it was captured
            with torch.no_grad():
                run_node(node, [gradient], [])
        else:
            edges.append(GradientEdge(node, 0))
            gradients.append(gradient)
    if edges:
        torch.autograd.backward(edges, gradients)


class NestedBackwards(TorchFunctionMode):
    """Has the backwards to all leaves that run within a backward run by another function.

    Reentrant checkpointing refuses a backward to chosen leaves, but only of the graph that it is a node of. In its own
    backward it runs its layers again and then a backward through their new graph, and that one can be split.
    """

    def __init__(self, run_backward: Callable[[Sequence[GradientEdge], Sequence[Tensor]], None]) -> None:
        """`run_backward` adds to the gradients of all leaves."""
        super().__init__()
        self._run_backward = run_backward

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function; a backward in another way, if gradients are all that comes of it."""
        kwargs = kwargs or {}
        # A layer that is run again may take gradients, too, to use them at once: gradients are enabled there.
        if func is torch.autograd.backward and not torch.is_grad_enabled() and not _asks_for_more(kwargs):
            tensors, gradients = _listed(args[0]), _listed(kwargs.get("grad_tensors"))
            is_plain = all(isinstance(argument, Tensor) for argument in (*tensors, *gradients))
            if is_plain and len(tensors) == len(gradients):
                self._run_backward([get_gradient_edge(tensor) for tensor in tensors], gradients)
                return None
        return func(*args, **kwargs)


def _asks_for_more(kwargs: Mapping[str, Any]) -> bool:
    """Whether the graph is to be kept, or to grow, or only some leaves get their gradients."""
    return bool(kwargs.get("retain_graph") or kwargs.get("create_graph")) or kwargs.get("inputs") is not None


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors or ())
