"""`StagePasses`: forward and backward of one stage, as one program runs them.

    forward    inputs -> layers -> outputs, SavedForward
    backward   SavedForward, gradients of the outputs -> gradients of the inputs

Inputs are detached leaves, so a backward ends at the stage's border. Of the outputs only the `GradientEdge`s are kept:
the tensors themselves are free as soon as they are sent. On a last stage the forward includes the loss, where the
backward begins.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.errors import PipelineError
from penstock.execute.batch.microbatch import MicrobatchKey
from penstock.execute.losses.tails import TailedOutput, reported_outputs
from penstock.execute.parameters.gradient_store import GradientStore, WeightInputs
from penstock.execute.split.deferred_weights import DeferredWeights
from penstock.execute.stages.feature import ForwardPart, StageFeature, has_methods
from penstock.execute.stages.keywords import run_layers
from penstock.execute.stages.stage import Stage
from penstock.execute.step import Step
from penstock.execute.values.tensors import in_own_memory
from penstock.execute.values.tree import detached, needing_gradient, tensors_of

Inputs = tuple[Any, ...]
Keywords = Mapping[str, Any]


@dataclass(slots=True)
class SavedForward:
    """A forward, as its backward needs it."""

    inputs: list[Tensor]
    """The input leaves that need a gradient."""
    edges: list[GradientEdge]
    """The edges at which gradients of outputs enter the graph; empty once the input gradients are computed."""
    loss_gradients: list[Tensor]
    """The gradient of the loss, or of the outputs whose loss weighs nothing; empty unless the stage is the last."""
    deferred: DeferredWeights | None = None
    """The weight gradients that I leaves for W; None for a forward whose backward runs as a whole."""
    parts: Sequence[ForwardPart] = ()
    """The parts of the stage's features in this forward."""

    def take_weight_inputs(self) -> WeightInputs:
        """Return what is left for the second part of a backward, and keep it no longer."""
        deferred, self.deferred = self.deferred, None
        return WeightInputs([]) if deferred is None else deferred.take_weight_inputs()


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOptions:
    """The role of a stage in a program."""

    is_first: bool = False
    """Whether its inputs are the batch, which belongs to the caller: its gradients, if any, are the caller's too."""
    is_last: bool = False
    """Whether its outputs go to the loss function."""
    is_training: bool = True
    is_split: bool = False
    """Whether forwards leave gradients of weights for later, so that backwards may run in two parts."""
    reduces_in_backward: bool = False
    """Whether modules exchange something with other replicas in backwards, which all of them must then run alike."""


class StepLayer(Protocol):
    """A layer that is told of steps, to read there what its owner may change between them."""

    def begin_step(self) -> None:
        """Begin a step: its forwards, whose number is not known, follow until `end_step`."""

    def end_step(self) -> None:
        """End a step, also one that has failed."""


@dataclass(eq=False)
class StagePasses:
    """Runs one stage; it holds nothing of any step."""

    stage: Stage
    options: PassOptions
    gradients: GradientStore
    """The gradients of the unit that the stage belongs to."""
    _features: Sequence[StageFeature] = ()

    def __post_init__(self) -> None:
        self._step_layers: list[Any] = [layer for layer in self.stage.modules if has_methods(layer, StepLayer)]

    def begin(self) -> None:
        """Begin a step; in training, how backwards are split is decided anew, and stays for all of the step."""
        for layer in self._step_layers:
            layer.begin_step()
        if not self.options.is_training:
            return
        if self.options.is_split:
            self.stage.split_planner.begin_step(self.stage.parameters())
        self.stage.own_weight_gradients.begin_step()

    def end(self) -> None:
        """End a step."""
        for layer in self._step_layers:
            layer.end_step()

    def forward(
        self, step: Step, place: MicrobatchKey, inputs: Inputs, keywords: Keywords
    ) -> tuple[Any, SavedForward | None]:
        """Run the layers one after another; the first gets all inputs, the others the result before them.

        Without training, nothing is saved.

        Raises:
            PipelineError: no gradient leads from the loss to what this stage could train.
        """
        parts = self.begin_parts(step, place)
        outputs, deferred = self.run_layers(parts, inputs, keywords)
        return outputs, self.finish(step, place, parts, inputs, outputs, deferred)

    def backward(self, saved_forward: SavedForward, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Add to the gradients of the weights and return those of the inputs, one for each saved input.

        `gradients` holds one tensor per output that needs one; on a last stage it is empty, the backward begins at the
        loss. An input that did not take part gets zeros.
        """
        saved_forward.deferred = None  # a schedule has whole backwards beside split ones, and they need no search
        return self._backward(saved_forward, gradients)

    def backward_input(
        self, saved_forward: SavedForward, gradients: Sequence[Tensor]
    ) -> tuple[list[Tensor], WeightInputs]:
        """Return the gradients of the inputs, and what is left for those of the weights."""
        stage, planner = self.stage, self.stage.split_planner
        with nullcontext() if planner.is_examined else planner.examining(stage.index, stage.named_parameters()):
            results = self._backward(saved_forward, gradients)
        return results, saved_forward.take_weight_inputs()

    # ---- forward

    def begin_parts(self, step: Step, place: MicrobatchKey) -> list[ForwardPart]:
        """Return the parts of one forward, one per feature."""
        return [begin(step, place) for begin in self._features]

    def run_layers(
        self, parts: Sequence[ForwardPart], inputs: Inputs, keywords: Keywords
    ) -> tuple[Any, DeferredWeights | None]:
        """Return what leaves the stage, and what the backward will leave for later."""
        stage, deferred, before_layer = self.stage, None, None
        if self.options.is_split:
            tensors = tensors_of(inputs)
            deferred = stage.split_planner.start(sum([tensor.numel() for tensor in tensors]))
        if deferred is None and not parts:
            return run_layers(stage, inputs, keywords), None
        for part in parts:
            inputs = part.arrive(inputs)
            before_layer = part.before_layer or before_layer
        with ExitStack() as stack:
            for part in parts:
                stack.enter_context(part.around_forward())
            outputs = run_layers(stage, inputs, keywords, before_layer)
        for part in reversed(parts):  # the first feature is outermost: the first to see inputs, the last to see outputs
            outputs = part.leave(outputs)
        return outputs, deferred

    def finish(
        self,
        step: Step,
        place: MicrobatchKey,
        parts: Sequence[ForwardPart],
        inputs: Inputs,
        outputs: Any,
        deferred: DeferredWeights | None,
    ) -> SavedForward | None:
        """End the forward of one microbatch or slice: compute the loss on a last stage, and return what backward needs.

        `place` is the microbatch and the slice. `inputs` are the detached leaves that the forward got. `parts` are
        those of the stage's features, such as skips, in this forward. `deferred` collects the weight gradients that a
        split backward leaves for a second action. Without training, the result is None.

        Raises:
            PipelineError: no gradient leads from the loss to anything that this stage could train.
        """
        if not self.options.is_last:
            return self._saved_forward(parts, inputs, outputs, deferred) if self.options.is_training else None
        loss = self._loss(step, place, parts, outputs)
        if not self.options.is_training:
            return None
        # The backward of a last stage begins at the roots. A loss whose weight is 0 may be NaN, as that of a microbatch
        # of padding alone behind a masked softmax; then `loss` is None, since 0 x NaN would make every gradient NaN.
        # Where other microbatches of the step weigh something, such a microbatch has no roots, and trains nothing.
        # Where all losses of the step weigh nothing, its outputs are the roots and get gradients of zeros, so that each
        # parameter gets a gradient of zeros and not None. Stages that exchange something in backwards get zeros as
        # well: other replicas, whose microbatch may weigh something, exchange it too, and in the same order.
        is_zero = loss is None and (step.losses.weigh_nothing or self.options.reduces_in_backward)
        if is_zero and isinstance(outputs, TailedOutput):
            outputs = outputs.outputs()
        roots = needing_gradient((outputs, step.losses.parameters()) if is_zero else loss)
        saved_forward = self._saved_forward(parts, inputs, roots, deferred)
        self._require_training(step, saved_forward, loss)
        fill = torch.zeros_like if is_zero else torch.ones_like
        saved_forward.loss_gradients = [fill(root) for root in roots]
        return saved_forward

    def _saved_forward(
        self, parts: Sequence[ForwardPart], inputs: Any, outputs: Any, deferred: DeferredWeights | None
    ) -> SavedForward:
        if self.options.is_first:
            inputs = ()  # autograd adds to the caller's own leaves; nobody waits for their gradients here
        for part in parts:
            inputs, outputs = part.without_passing(inputs, outputs)
        edges = [get_gradient_edge(tensor) for tensor in needing_gradient(outputs)]
        leaves = [leaf for part in parts for leaf in part.leaves]
        return SavedForward([*needing_gradient(inputs), *leaves], edges, [], deferred, parts)

    def _loss(self, step: Step, place: MicrobatchKey, parts: Sequence[ForwardPart], outputs: Any) -> Tensor | None:
        if step.output_ranks:
            step.outputs[place] = detached(reported_outputs(outputs))
        target = step.slices[place[0]][place[1]].target
        with ExitStack() as stack:
            for part in parts:
                stack.enter_context(part.around_loss())
            return step.losses.compute(place, outputs, target, is_training=self.options.is_training)

    def _require_training(self, step: Step, saved_forward: SavedForward, loss: Tensor | None) -> None:
        """Refuse a loss whose backward would train nothing."""
        begins = any(part.begins_backwards for part in saved_forward.parts)
        is_idle = loss is not None and not loss.requires_grad and not begins
        if is_idle and step.is_frozen:
            # Not before the step: a soft prompt or a parameter of the loss may be all that is trained.
            raise PipelineError(
                "all parameters of the model are frozen, on all ranks, and the loss needs no gradient either, so that "
                "the step would train nothing; set requires_grad_(True) for what is to be trained, or call evaluate"
            )
        if is_idle and (saved_forward.inputs or any(parameter.requires_grad for parameter in self.stage.parameters())):
            raise PipelineError(
                f"stage {self.stage.index}: its outputs need no gradient, so that nothing would be trained, though its "
                "inputs or its parameters do; let the last layers run without detach(), item() or no_grad(), or "
                "call evaluate"
            )

    # ---- backward

    def _backward(self, saved_forward: SavedForward, gradients: Sequence[Tensor]) -> list[Tensor]:
        gradients = [*gradients, *saved_forward.loss_gradients]
        if not saved_forward.parts:
            return self._run_backward(saved_forward, gradients)
        # The parts leave `saved_forward`, so that the tensors of features are free once this backward is over.
        parts, saved_forward.parts = saved_forward.parts, ()
        leaves = [part.leaves for part in parts]
        with ExitStack() as stack:
            # The roots of features come after the stage's own outputs, in the order of the features: autograd adds up
            # in the order of its roots, so another order gives other bits.
            for part in parts:
                edges, root_gradients = part.roots()
                saved_forward.edges += edges
                gradients += root_gradients
            for part in parts:
                stack.enter_context(part.around_backward())
            results = self._run_backward(saved_forward, gradients)
        first = num_stage_inputs = len(results) - sum(map(len, leaves))
        for part, part_leaves in zip(parts, leaves, strict=True):
            part.take_gradients(results[first : first + len(part_leaves)])
            first += len(part_leaves)
        return results[:num_stage_inputs]

    def _run_backward(self, saved_forward: SavedForward, gradients: Sequence[Tensor]) -> list[Tensor]:
        deferred = saved_forward.deferred
        self.gradients.begin_backward()
        if saved_forward.edges:
            with self.stage.own_weight_gradients.around_backward(None if deferred is None else deferred.entries):
                if deferred is None:
                    torch.autograd.backward(saved_forward.edges, gradients)
                else:
                    deferred.backward_input(saved_forward.edges, gradients, self.gradients.separate_first_gradients)
        results = []
        for leaf in saved_forward.inputs:
            gradient, leaf.grad = leaf.grad, None
            # An unused input gets zeros, since the stage before waits for a message in any case.
            results.append(torch.zeros_like(leaf) if gradient is None else in_own_memory(gradient))
        # `gradients` outlive the backward too; a first gradient in the memory of one of them would change it later.
        if deferred is None:
            self.gradients.end_backward((), gradients)
        else:
            self.gradients.end_backward(deferred.take_leaves(), gradients, deferred.entries)
        saved_forward.inputs, saved_forward.edges, saved_forward.loss_gradients = [], [], []
        return results
