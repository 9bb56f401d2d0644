"""Weight gradients that layers compute by themselves, and when: in W, or at the end of a whole backward.

Three forms of it are known:
    closures      a layer's backward hands over a function to `WEIGHT_GRADIENTS` (DualPipe's `WeightGradStore`)
    fused layers  a module with `need_backward_dw()` and `backward_dw()`, which fused-layer libraries such as
                  Transformer Engine have: its backward fills a queue, and each call takes the oldest entry
    a builder     an attribute `dw_builder` of a layer, as torch.distributed.pipelining takes it: called after each
                  backward, it returns the function that computes the weight gradients

Guarantees: each of them runs once per backward, in W where the backward is split. The gradients of fused layers are
accumulated by autograd, so hooks see each one once. Relies on: where ranks are threads of one process they compute on
CPUs, for which autograd stays in the thread that asks.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.errors import PipelineError
from penstock.execute.parameters.gradient_store import WeightEntry, without_gradients

Closure = Callable[[], Any]


@dataclass(frozen=True, slots=True, eq=False)
class OwnEntry:
    """A function that a layer has left for W: it writes gradients by itself."""

    run: Closure
    parameters: Sequence[Tensor] = ()
    roots: Sequence[GradientEdge] = ()

    @property
    def held_tensors(self) -> list[Tensor]:
        """Return an empty list: only references of the function lead to its tensors, and memory reports follow them."""
        return []

    def gradients(self) -> Sequence[Tensor]:
        """Run the function, which returns no gradients."""
        self.run()
        return ()


class WeightGradients:
    """Where the backward of a layer leaves the function that computes its weight gradients.

    def backward(ctx, gradient):
        def weight_gradient(): ctx.weight.grad += ...
        WeightGradStore.put(weight_gradient)
    """

    def __init__(self) -> None:
        self._running: dict[int, list[WeightEntry] | None] = {}
        """Entries to which functions are added, by thread that runs a backward; None in a whole backward."""

    @property
    def enabled(self) -> bool:
        """Whether the `I` of a split backward runs, so that functions wait for `W`."""
        return self._current_entries() is not None

    def put(self, closure: Closure) -> None:
        """Have a function called in `W`; outside of an `I`, at once. It adds to `.grad` by itself."""
        entries = self._current_entries()
        if entries is None:
            closure()
        else:
            entries.append(OwnEntry(closure))

    @contextmanager
    def waiting_in(self, entries: list[WeightEntry] | None) -> Iterator[None]:
        """Run a backward in here: an `I`, which adds functions to `entries`, or with None a whole one."""
        thread = threading.get_ident()
        outer_entries = self._running.get(thread)
        self._running[thread] = entries
        try:
            yield
        finally:
            del self._running[thread]
            if outer_entries is not None:
                self._running[thread] = outer_entries

    def _current_entries(self) -> list[WeightEntry] | None:
        thread = threading.get_ident()
        if thread in self._running or len(self._running) != 1:
            return self._running.get(thread)
        (entries,) = self._running.values()  # a thread in which autograd runs the nodes of a device
        return entries


WEIGHT_GRADIENTS = WeightGradients()


class OwnWeightGradients:
    """The layers of a stage that compute weight gradients later by themselves, found when the stage is made."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        """A layer that stands there twice has a backward, and an entry in its queue, for each time."""
        self.fused = [fused_layer for layer in layers for fused_layer in fused_layers(layer)]
        """The layers with a queue."""
        builders: list[Any] = [getattr(layer, "dw_builder", None) for layer in layers]
        self._builders = [build for build in builders if callable(build)]
        self._entries: list[Any] = []
        """The layers with an entry in their queue, once for each."""
        self._is_running = False

    def __bool__(self) -> bool:
        return bool(self.fused or self._builders)

    @property
    def has_queues(self) -> bool:
        """Whether any layer has a queue now, which asks for W in the order of I."""
        return any(layer.need_backward_dw() for layer in self.fused)

    def begin_step(self) -> None:
        """Throw away what a failed step has left in the queues.

        Raises:
            PipelineError: it failed in a backward of this stage, so that nobody knows what is in them.
        """
        if self._is_running:
            raise PipelineError(
                "a step has failed in the backward of layers that compute weight gradients later by themselves; what "
                "it left in their queues would be added to later gradients. Build the layers and the pipeline again, "
                "from a checkpoint"
            )
        while self._entries:
            _gradients_of_entry(self._entries.pop())

    @contextmanager
    def around_backward(self, entries: list[WeightEntry] | None) -> Iterator[None]:
        """Run a backward in here: an I, which adds what waits for W to a list, or with None a whole one."""
        self._is_running = bool(self)
        with WEIGHT_GRADIENTS.waiting_in(entries):
            yield
        self._is_running = False  # not if it fails
        queues = [layer for layer in self.fused if layer.need_backward_dw()]
        self._entries += queues
        closures: list[Closure] = [*(partial(self._take_entry, layer) for layer in queues)]
        closures += [build() for build in self._builders]
        if entries is not None:
            entries += map(OwnEntry, closures)
            return
        with torch.no_grad():
            while closures:
                closures.pop(0)()

    def _take_entry(self, layer: Any) -> None:
        self._entries.remove(layer)
        edges_and_gradients = _gradients_of_entry(layer)
        if edges_and_gradients:
            torch.autograd.backward(
                [edge for edge, _ in edges_and_gradients], [gradient for _, gradient in edges_and_gradients]
            )


def fused_layers(module: nn.Module) -> list[Any]:
    """Return the outermost modules with the protocol of fused layers: they call those inside by themselves."""
    if callable(getattr(module, "need_backward_dw", None)) and callable(getattr(module, "backward_dw", None)):
        return [module]
    return [fused_layer for child in module.children() for fused_layer in fused_layers(child)]


def _gradients_of_entry(layer: Any) -> list[tuple[GradientEdge, Tensor]]:
    """Run `backward_dw`, and return where each gradient that it has left belongs.

    Some libraries replace `.grad`, others add to it, and none calls autograd's hooks. So `.grad` is empty meanwhile.
    """
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    with without_gradients(parameters):
        layer.backward_dw()
        gradients = [parameter.grad for parameter in parameters]
    with torch.enable_grad():
        edges = [get_gradient_edge(parameter) for parameter in parameters]
    return [(edge, gradient) for edge, gradient in zip(edges, gradients, strict=True) if gradient is not None]
