"""A layer at work on one microbatch without values: its forward and its backwards, whole and split.

    whole     F, B            products of the forward; the workspaces of both
    split     F, I, W         products of the input and the weight gradients; what waits for W

A split backward is planned by the stage's own planner, as in training: what its first step shows, such as weights that
are too small to wait, decides how the next one is split. So the passes run until the plan stays.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from penstock.execute.observing.layer_sizes import (
    BACKWARD_WORKSPACE,
    CONTEXT,
    FORWARD_WORKSPACE,
    LayerSizes,
    SavedTensorTracker,
    storages,
)
from penstock.execute.observing.workspaces import StorageMeter
from penstock.execute.parameters.gradient_store import GradientStore
from penstock.execute.split.deferred_weights import DeferredWeights
from penstock.execute.stages.stage import Stage
from penstock.execute.undocumented import version_of
from penstock.execute.values.tree import tensors_of
from penstock.simulation.costs.layer_work import PassWork
from penstock.sizing.trace import Trace
from penstock.train.measuring.measure import LayerPasses

_MAX_ROUNDS = 4
"""Steps after which a plan of split backwards is taken as it is."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerCall:
    """A layer, and what it gets of one microbatch."""

    name: str
    index: int
    """The place of the layer in the model."""
    module: nn.Module
    args: tuple[Any, ...]
    keywords: Mapping[str, Any]
    skips: Mapping[str, Any]
    finish: Callable[[Any], Any]
    """The function of its output at which its backward begins: the loss, for the last layer."""
    is_last: bool = False

    def passes(self) -> LayerPasses:
        """Return new passes of the layer."""
        return LayerPasses(self.module, self.args, self.keywords, self.skips, finish=self.finish)

    def stage(self) -> Stage:
        """Return a stage of the layer alone."""
        return Stage(0, {self.name: self.module}, first_layer=self.index)


@dataclass(frozen=True, slots=True)
class KindWork:
    """The work that all layers of one kind do."""

    forward: PassWork
    backward_input: PassWork
    backward_weight: PassWork
    weight_context_bytes: int
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    gets_gradient: tuple[bool, ...]
    """Whether a gradient comes to each parameter, in their order."""


class CountedStage:
    """The layers of a stage, with the counters by which a pipeline reports what they keep."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.sizes = LayerSizes([stage], StorageMeter(), is_sharded=False)
        self._tracker = SavedTensorTracker(self.sizes.note_saved)

    @contextmanager
    def forward(self, *, has_workspace: bool = False) -> Iterator[None]:
        """Count what the forwards of the layers keep that run in here, and with `has_workspace` what they take."""
        parameter_addresses = frozenset(storages(list(self.stage.parameters())))
        note_outputs = partial(self._tracker.note_functions, self.stage.index)
        with (
            self._tracker.tracking(self.stage.index, parameter_addresses, _called),
            self.sizes.watching(self.stage, _called, note_outputs, has_workspace=has_workspace),
        ):
            yield

    def run_backward(self, roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Run a whole backward, and count what it takes."""
        with self.sizes.watching_backward(self.stage, _called):
            torch.autograd.backward(roots, gradients)

    def sizes_of(self, call: LayerCall) -> Mapping[str, int]:
        """Return the sizes of one layer, by the fields of `LayerCosts`."""
        return self.sizes.local_sizes(None)[str(call.index)]


def work_of(call: LayerCall) -> KindWork:
    """Run the passes of a layer whose trained parameters have gradients already, and return the work of its kind.

    Its workspaces are the larger ones of a whole backward and of a split one.
    """
    backward_input, backward_weight, sizes_of_split = _split_work(call)
    gradients = [parameter.grad for parameter in call.module.parameters()]
    versions = [None if gradient is None else version_of(gradient) for gradient in gradients]
    counted, trace, passes = CountedStage(call.stage()), Trace(), call.passes()
    with trace:
        with trace.part() as forward, counted.forward(has_workspace=True):
            roots = passes.forward()
            if call.is_last:  # a stage hands its last outputs to the loss alone
                passes.output = None
        passes.backward(roots, counted.run_backward)
    sizes = counted.sizes_of(call)
    return KindWork(
        forward.work(),
        backward_input,
        backward_weight,
        sizes_of_split[CONTEXT],
        sizes[FORWARD_WORKSPACE],
        max(sizes[BACKWARD_WORKSPACE], sizes_of_split[BACKWARD_WORKSPACE]),
        tuple(
            gradient is not None and version_of(gradient) != version
            for gradient, version in zip(gradients, versions, strict=True)
        ),
    )


def _split_work(call: LayerCall) -> tuple[PassWork, PassWork, Mapping[str, int]]:
    """Return the work of both parts of a split backward, and the sizes that they show."""
    stage = call.stage()
    store = GradientStore(stage.parameters)
    planner = stage.split_planner
    num_elements = sum(tensor.numel() for tensor in tensors_of(call.args))
    for _ in range(_MAX_ROUNDS):
        planner.begin_step(stage.parameters())
        stage.own_weight_gradients.begin_step()
        store.begin_step()
        counted, trace, passes = CountedStage(stage), Trace(), call.passes()
        deferred = planner.start(num_elements)
        with trace:
            with counted.forward(has_workspace=True):
                roots = passes.forward()
            with trace.part() as backward_input:
                passes.backward(roots, partial(_run_backward_input, counted, deferred, store))
            weight_inputs = deferred.take_weight_inputs()
            counted.sizes.note_contexts(stage, weight_inputs, ())
            with trace.part() as backward_weight, counted.sizes.watching_weights(stage, weight_inputs, _called):
                store.add(weight_inputs)
        store.end_step()
        if planner.is_settled:
            break
    return backward_input.work(), backward_weight.work(), counted.sizes_of(call)


def _run_backward_input(
    counted: CountedStage,
    deferred: DeferredWeights,
    store: GradientStore,
    roots: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> None:
    edges = [get_gradient_edge(root) for root in roots]
    with counted.sizes.watching_backward(counted.stage, _called):
        store.begin_backward()
        with counted.stage.own_weight_gradients.around_backward(deferred.entries):
            deferred.backward_input(edges, gradients, store.separate_first_gradients)
        store.end_backward(deferred.take_leaves(), gradients, deferred.entries)


def _called(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
