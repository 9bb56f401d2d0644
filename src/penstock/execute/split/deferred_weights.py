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
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import CheckpointError

from penstock.errors import PipelineError
from penstock.execute.split.graph_search import Survey
from penstock.execute.split.late_gradients import LateGradient, add_gradients
from penstock.execute.split.nested_backwards import NestedBackwards
from penstock.execute.split.parted_products import Parting, StrangeActivations

Watch = Callable[[Parting], AbstractContextManager[None]]
"""Has products of some layers run through a `Parting`."""
Search = Callable[[Sequence[GradientEdge], Set[int]], Survey]
"""From where a backward begins, and ids of weights that were parted in the forward."""
GiveUp = Callable[[frozenset[int]], str]
"""Has no later step part in the forward, and names the weights whose ids it gets."""


class DeferredWeights:
    """The weight gradients of one forward that its input part leaves behind."""

    def __init__(self, search: Search | None, weights: frozenset[int], watch: Watch, give_up: GiveUp) -> None:
        """`search` finds what may wait, where anything may; products of `weights` are parted in the forward."""
        self.late: list[LateGradient] = []
        """In the order in which a whole backward would come to them; filled by the input part."""
        self._search = search
        self._parting = Parting(weights)
        self._watch = watch
        self._give_up = give_up

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
        """Run the backward but for what may wait; layers that run again in it take the same way as in the forward.

        Raises:
            PipelineError: layers that run again do not take the way of the forward, in which products were parted.
        """
        try:
            with self._running_backward():
                self._run_backward(edges, gradients)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self.is_parted:
                self._blame_parting(error)
            raise

    def add_gradients(self) -> None:
        """Add the gradients of the weights, once; hooks see one gradient per weight, the sum over its uses."""
        late = list(self.late)
        self.late.clear()
        with self._running_backward():  # what weights are made of may have to be computed again
            add_gradients(late)

    def _run_backward(self, edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
        survey = None if self._search is None else self._search(edges, self._parting.seen)
        if survey is not None and survey.is_opaque:
            with NestedBackwards(self._run_backward):
                torch.autograd.backward(edges, gradients)
        elif survey is not None and survey.late:
            self._run_without(survey, edges, gradients)
        else:
            torch.autograd.backward(edges, gradients)

    def _blame_parting(self, error: RuntimeError) -> None:
        """From the next step on the forward is that of a whole backward, whether or not it was the parting."""
        names = self._give_up(frozenset(self._parting.seen))
        if isinstance(error, CheckpointError | StrangeActivations):
            raise PipelineError(
                f"layers that run again in the backward did not do what they did in the forward, in which the products "
                f"of {names} were run apart from their weights: {error}. Their gradients are not used. From the next "
                "step on these weights take their gradients in the input part of the backward: zero the gradients and "
                "run the step again. If it fails again, the layers are not deterministic"
            ) from error

    def _run_without(self, survey: Survey, edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
        # Edges, since a mode sees a call with tensors and is off until it returns: then it would miss what runs again.
        inputs: list[Any] = [get_gradient_edge(leaf) for leaf in survey.early]
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
