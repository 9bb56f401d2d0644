"""One stage by itself, on a step of one microbatch."""

import torch

from penstock.execute.batch.microbatch import Microbatch
from penstock.execute.losses.loss import LossShares
from penstock.execute.losses.step_losses import StepLosses
from penstock.execute.parameters.gradient_store import GradientStore, WeightInputs
from penstock.execute.split.own_weight_gradients import OwnWeightGradients
from penstock.execute.stages.passes import PassOptions, StagePasses
from penstock.execute.step import Step

PLACE = (0, 0)


def step_of(loss=None, *, num_slices=1, auxiliary=1.0, **options):
    """Make a step of one microbatch."""
    fractions = [[1 / num_slices] * num_slices]
    shares, auxiliary_shares = LossShares([1.0], fractions), LossShares([auxiliary], fractions)
    losses = StepLosses(1, num_slices, loss, shares, auxiliary_shares, **options)
    return Step([[Microbatch(0, (), {}, None, 1) for _ in range(num_slices)]], losses)


def run_input_part(deferred, edges, gradients):
    """Run I, which leaves something in `deferred`."""
    with OwnWeightGradients(()).around_backward(deferred.entries):
        deferred.backward_input(edges, gradients)


def run_weight_part(deferred):
    """Run W by what an I has left in `deferred`."""
    GradientStore(list).add(deferred.take_weight_inputs())


def kept_by(deferred):
    """Return the tensors that what waits for W holds."""
    return [tensor for entry in deferred.entries for tensor in entry.held_tensors]


def passes_of(stage, features=(), **options):
    """Return a stage with gradients of its own."""
    return StagePasses(stage, PassOptions(**options), GradientStore(stage.parameters), features)


class OneStage:
    """A stage with its passes and a step; with a `loss`, a function of the output, it is a last stage."""

    def __init__(self, stage, *, loss=None, features=(), step=None, **options):
        self.stage = stage
        self.passes = passes_of(stage, features, is_last=loss is not None, **options)
        self.step = step or step_of(loss and (lambda output, target: loss(output)))
        self.begin()

    def begin(self):
        """Begin another step on the same stage."""
        self.passes.begin()
        self.passes.gradients.begin_step()

    def forward(self, *inputs, place=PLACE, **keywords):
        """Return the outputs and what was saved."""
        return self.passes.forward(self.step, place, inputs, keywords)

    def saved(self, *inputs, place=PLACE):
        """Run the forward, and return what was saved."""
        return self.forward(*inputs, place=place)[1]

    def backward(self, saved, *gradients):
        """Run a whole backward."""
        return self.passes.backward(saved, gradients)

    def backward_input(self, saved, *gradients):
        """Run the part for the gradients of inputs; what it leaves is in `saved` again."""
        results, saved.deferred = self.passes.backward_input(saved, gradients)
        return results

    def backward_weight(self, saved):
        """Run the part for the gradients of weights."""
        left, saved.deferred = saved.deferred, None
        self.passes.gradients.add(left or WeightInputs([]))


class Again(torch.autograd.Function):
    """Keeps nothing of its layers but their input, as a function of a user may, and runs a backward in its own."""

    @staticmethod
    def forward(ctx, layers, hidden):
        ctx.layers = layers
        ctx.save_for_backward(hidden)
        return layers(hidden)

    @staticmethod
    def backward(ctx, gradient):
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.layers(hidden)
        torch.autograd.backward(output, gradient)
        return None, hidden.grad
