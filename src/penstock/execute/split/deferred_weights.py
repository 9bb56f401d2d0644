"""`DeferredWeights`: what one forward leaves for the two parts of a split backward.

    I   a backward to all leaves but the weights that wait; of these, what W needs is kept
    W   the weight gradients from what was kept

I computes exactly what it is told to, by `inputs` of autograd's backward, so the forward is one like any other. It
frees the graph as it goes, but for the few nodes that lead to weights that wait.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

from penstock.execute.parameters.gradient_store import WeightEntry, WeightInputs
from penstock.execute.split.graph_search import Survey
from penstock.execute.split.waiting import Waiting
from penstock.execute.undocumented import has_hooks, nodes_in_python_stay, order_of, run_node

Search = Callable[[Sequence[GradientEdge]], Survey]
"""From where a backward begins."""


class DeferredWeights:
    """The weight gradients of one forward that are left to W."""

    def __init__(self, search: Search | None) -> None:
        """`search` finds what can wait, if anything."""
        self.entries: list[WeightEntry] = []
        """In the order in which a whole backward would come to them; filled by I. Layers add functions of their own."""
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
        first_apart: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Run I from some edges, as `torch.autograd.backward` runs a whole backward.

        Within `first_apart` first gradients share no memory with what is kept for W: a backward that a node in Python
        runs may add to them before I is over.
        """
        if not nodes_in_python_stay():
            self._graph += edges
        survey = Survey() if self._search is None else self._search(edges)
        self._leaves += survey.immediate.values()
        apart = first_apart() if survey.functions or survey.is_opaque else nullcontext()
        waiting = survey.waiting
        if not waiting:
            with apart, NestedBackwards(self.backward_input) if survey.is_opaque else nullcontext():
                torch.autograd.backward(edges, gradients)
            return
        inputs: list[Any] = [GradientEdge(node, 0) for node in survey.immediate]
        hands_over = any(each.is_entry for each in waiting)
        ends = [each.ends(hands_over=hands_over) for each in waiting]
        inputs += [edge for each in ends for edge in each]
        orders = {id(each): order_of(each.node) for each in waiting} if hands_over else {}
        found: list[Waiting] = []
        for each in waiting:
            each.watch(found)
        try:
            with apart:
                if hands_over:
                    captured = iter(torch.autograd.grad(edges, inputs, gradients, allow_unused=True))
                    _accumulate([(leaf, node, next(captured)) for node, leaf in survey.immediate.items()])
                    found += _kept(zip(waiting, [[next(captured) for _ in own] for own in ends], strict=True))
                else:
                    torch.autograd.backward(edges, gradients, inputs=inputs)
        finally:
            for each in waiting:
                each.release()
        # As a whole backward comes to them, which has run those that were handed over in their turn.
        self.entries += sorted(found, key=lambda each: orders[id(each)], reverse=True) if hands_over else found


def _kept(arrived: Iterable[tuple[Waiting, Sequence[Tensor | None]]]) -> Iterator[Waiting]:
    """Have each keep the gradients that a backward has handed over, and return those to which any came."""
    for each, gradients in arrived:
        if any(gradient is not None for gradient in gradients):
            each.keep(gradients)
            yield each


def _accumulate(found: Sequence[tuple[Tensor, Node, Tensor | None]]) -> None:
    """Add gradients that a backward has handed over to those of leaves."""
    edges: list[Any] = []
    gradients: list[Tensor] = []
    for leaf, node, gradient in found:
        if gradient is None:
            continue
        if has_hooks(leaf):  # they have seen the gradient when it was handed over
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

    def __init__(self, run: Callable[[Sequence[GradientEdge], Sequence[Tensor]], None]) -> None:
        """`run` adds to the gradients of all leaves."""
        super().__init__()
        self._run = run

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function; a backward in another way, if gradients are all that comes of it."""
        kwargs = kwargs or {}
        # A layer that is run again may take gradients, too, to use them at once: gradients are enabled there.
        if func is torch.autograd.backward and not torch.is_grad_enabled() and not _asks_for_more(kwargs):
            tensors, gradients = _listed(args[0]), _listed(kwargs.get("grad_tensors"))
            is_plain = all(isinstance(each, Tensor) for each in (*tensors, *gradients))
            if is_plain and len(tensors) == len(gradients):
                self._run([get_gradient_edge(tensor) for tensor in tensors], gradients)
                return None
        return func(*args, **kwargs)


def _asks_for_more(kwargs: Mapping[str, Any]) -> bool:
    """Whether the graph is to be kept, or to grow, or only some leaves get their gradients."""
    return bool(kwargs.get("retain_graph") or kwargs.get("create_graph")) or kwargs.get("inputs") is not None


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors or ())
