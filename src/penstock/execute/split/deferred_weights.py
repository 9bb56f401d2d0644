"""`DeferredWeights`: what a forward whose backward runs in two parts leaves for each of them.

    input part   a backward to all leaves but the weights of products; of these, activations and gradients are kept
    weight part  the weights' gradients from what was kept

The input part computes exactly what it is told to, by `inputs` of autograd's backward, so the forward is one like any
other. It frees the graph as it goes, but for the few nodes that lead from products to weights.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from penstock.execute.split.graph_search import Survey
from penstock.execute.split.late_gradients import LateGradient, add_gradients
from penstock.execute.split.parted_products import Parting

Watch = Callable[[Parting], AbstractContextManager[None]]
"""Has products of some layers run through a `Parting`."""
Search = Callable[[Sequence[GradientEdge], Set[int]], Survey]
"""From where a backward begins, and ids of weights that were parted in the forward."""


class DeferredWeights:
    """The weight gradients of one forward that its input part leaves behind."""

    def __init__(self, search: Search | None, weights: frozenset[int] | None, watch: Watch) -> None:
        """`search` finds what may wait, where anything may; products of `weights` are parted in the forward."""
        self.late: list[LateGradient] = []
        """In the order in which a whole backward would come to them; filled by the input part."""
        self._search = search
        self._parting = Parting(self.late, weights)
        self._watch = watch

    @property
    def is_parted(self) -> bool:
        """Whether the forward was another than it would have been for a whole backward."""
        return bool(self._parting.seen)

    @property
    def kept_gradients(self) -> list[Tensor]:
        """What the input part has left for the weight part, and must not be changed before."""
        return [each.gradient for each in self.late if each.gradient is not None]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run the forward in here."""
        with self._watch(self._parting):
            yield

    def run_input_part(self, edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
        """Run the backward but for what may wait; layers that run again in it take the same way as in the forward."""
        with self._running_backward():
            survey = None if self._search is None else self._search(edges, self._parting.seen)
            if survey is None or survey.is_opaque or not survey.late:
                torch.autograd.backward(edges, gradients)
            else:
                self._run_without(survey, edges, gradients)

    def add_gradients(self) -> None:
        """Add the gradients of the weights, once; hooks see one gradient per weight, the sum over its uses."""
        late = list(self.late)
        self.late.clear()
        with self._running_backward():  # what weights are made of may have to be computed again
            add_gradients(late)

    def _run_without(self, survey: Survey, edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
        inputs: list[Any] = list(survey.early)
        for product in survey.late:
            product.watch(self.late)
            if (end := product.end()) is not None:  # else no backward would come by
                inputs.append(end)
        try:
            torch.autograd.backward(edges, gradients, inputs=inputs)
        finally:
            for product in survey.late:
                product.let_go()

    @contextmanager
    def _running_backward(self) -> Iterator[None]:
        self._parting.is_in_backward = True
        try:
            with self._watch(self._parting):
                yield
        finally:
            self._parting.is_in_backward = False
