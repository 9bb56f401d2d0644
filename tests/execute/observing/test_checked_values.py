"""The first instruction that makes a value which is not finite is named, with its layer."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock.errors import PipelineError
from penstock.execute.observing.checked_values import not_finite
from penstock.schedules import build
from tests.support.local_pipelines import (
    Task,
    difference,
    error_of,
    float_layers,
    float_task,
    on_pipelines,
    settle,
    square_loss,
    step_task,
    values,
    zero,
)

NAN, INF = float("nan"), float("inf")


class Breaks(nn.Module):
    """Makes one value of its `number`-th forward, or of its gradient, something else."""

    def __init__(self, number, value=NAN, *, backward=False):
        super().__init__()
        self.number = number
        self.value = value
        self.backward = backward
        self.calls = 0
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        self.calls += 1
        y = self.inner(x)
        if self.calls != self.number:
            return y
        if not self.backward:
            return y + torch.full_like(y, self.value)
        return Spoils.apply(y, self.value)


class Spoils(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient[0, 0] = ctx.value
        return gradient, None


def failing(make_layers, name="1f1b", loss=square_loss):
    """Return the error of a step of two ranks."""
    task = replace(float_task(8), make_layers=make_layers, loss=loss)
    return error_of(on_pipelines, 2, task, lambda pipeline: step_task(pipeline, task), name, debug="values")


def layers_with(place, breaking):
    layers = float_layers(num_layers=4)
    layers[place] = nn.Sequential(nn.Linear(6, 6), breaking)
    return layers


def layers_of_a_bad_batch():
    layers = float_layers(num_layers=4)
    layers[0].register_forward_pre_hook(lambda _, args: (args[0] / 0,), prepend=True)
    return layers


MADE = {
    "an output": (
        lambda: layers_with(2, Breaks(3, INF)),
        "rank 1, 1F2, in layer 2 (Sequential): PipelineError: 1F2: the output of layer '2.1' has 0 NaN and 12 infinite",
    ),
    "a gradient": (
        lambda: layers_with(1, Breaks(3, backward=True)),
        "rank 0, 0B2: PipelineError: 0B2: the gradient that layer '1' gives its input has",
    ),
    # The first layer gives no gradient to its input, which is the batch.
    "a gradient of a parameter alone": (
        lambda: layers_with(0, Breaks(2, backward=True)),
        "rank 0, 0B1: PipelineError: 0B1: the gradient of '0.",
    ),
    "the batch": (layers_of_a_bad_batch, "0F0: an input of layer '0', the stage's first, has"),
}
"""By what is not finite, the layers that make it, and what the error tells."""


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("what", MADE)
def test_what_is_not_finite_is_named_with_rank_action_and_module(what, name):
    make_layers, text = MADE[what]

    error = failing(make_layers, name)

    assert isinstance(error, PipelineError)
    assert (text if name == "1f1b" else text.replace("0B", "0I")) in str(error)


def test_the_loss_and_what_a_tensor_stores_are_looked_at():
    of_loss = failing(lambda: float_layers(num_layers=4), loss=lambda output, target: (output - target).sum() / 0)

    assert "rank 1, 1F0: PipelineError: 1F0: the loss has" in str(of_loss)
    assert not_finite(torch.arange(3)) == not_finite(torch.empty(3, device="meta")) == ""
    assert not_finite(torch.tensor([1.0, NAN, -INF, INF])) == "has 1 NaN and 2 infinite of its 4 values"


def test_every_rank_is_told_where_a_value_that_is_not_finite_was_made_and_other_errors_tell_nothing():
    def find(pipeline):
        try:
            return pipeline.find_not_finite(*task.inputs, target=task.target)
        except PipelineError as error:
            return error.finding, "which looks like a finding" in str(error)

    task = replace(float_task(8), make_layers=lambda: layers_with(2, Breaks(3, INF)))
    found = on_pipelines(2, task, find)
    others = on_pipelines(2, replace(task, make_layers=lambda: layers_with(2, Misleads())), find)

    told = "rank 1, stage 1, microbatch 2, in 1F2: the output of layer '2.1' has 0 NaN and 12 infinite of its 12 values"
    assert found == [told, told]
    assert others == [("", True)] * 2


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    "schedule",
    ["1f1b", "zbv", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpipe", "interleaved-1f1b", "zb-h1"))],
)
def test_a_gradient_that_an_earlier_step_has_left_is_not_blamed_on_this_one(schedule, num_ranks):
    task, name = replace(float_task(8), make_layers=lambda: float_layers(num_layers=4)), "1.1.weight"

    def case(pipeline):
        own = dict(pipeline.named_parameters())
        if name in own:
            own[name].grad = torch.full_like(own[name], NAN)
        found = pipeline.find_not_finite(*task.inputs, target=task.target)
        gradients = [parameter.grad for parameter in own.values() if parameter.grad is not None]
        zero(pipeline)
        return name in own, found, len(gradients), pipeline.find_not_finite(*task.inputs, target=task.target)

    ranks = on_pipelines(num_ranks, task, case, schedule)

    [holder] = [rank for rank, (holds, *_) in enumerate(ranks) if holds]
    told = (
        f"rank {holder}, before the step: the gradient of '{name}' has 36 NaN and 0 infinite of its 36 values, left "
        "over from an earlier step or backward, not made by this one: zero the gradients, then run it again"
    )
    assert [found for _, found, *_ in ranks] == [told] * num_ranks
    assert ranks[holder][2] == 1  # the step has added nothing there
    assert [again for *_, again in ranks] == [""] * num_ranks  # nor is a failed step blamed on the one after it


class Misleads(nn.Module):
    def forward(self, x):
        raise ValueError("1F0: the text, which looks like a finding, the first here that are not finite")


def test_a_loss_without_weight_may_be_anything():
    """Its microbatch has no tokens, so it trains nothing."""
    inputs, target = values(1, 8, 6), values(2, 8, 6)
    target[2:4] = NAN

    options = {"count": lambda target: int(torch.isfinite(target).sum())}
    task = Task(lambda: float_layers(num_layers=4), (inputs,), target, square_loss, options)

    outcomes = on_pipelines(2, task, lambda pipeline: step_task(pipeline, task), debug="values")

    assert all(torch.isfinite(gradient).all() for outcome in outcomes for gradient in outcome.gradients.values())


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe-v"])
def test_finite_steps_pass_bit_for_bit_and_leave_no_hooks(name):
    schedule = build(name, ranks=2, microbatches=4)
    task = replace(float_task(8), make_layers=lambda: float_layers(num_layers=schedule.num_stages))

    def case(pipeline):
        outcome = step_task(pipeline, task)
        modules = [module for stage in pipeline.stages for layer in stage.layers.values() for module in layer.modules()]
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
        pipeline.evaluate(*task.inputs, target=task.target)
        return outcome

    outcomes = on_pipelines(2, task, case, schedule, None, debug="values")
    assert difference(outcomes, task.reference(4)) == []


class PartInPlace(nn.Linear):
    """Changes a part of its output, which is a view for inputs of three dimensions."""

    def forward(self, x):
        y = super().forward(x)
        y[..., :3].mul_(2)
        return y


class Mapped(nn.Module):
    """Runs its inner layer under a function transform, which has no values to read."""

    def __init__(self, transformed):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.transformed = transformed

    def forward(self, x):
        return x + self.transformed(self.inner)(x)


class Table(nn.Module):
    """Adds rows of a table whose gradient is sparse."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 6, sparse=True)

    def forward(self, x):
        return x + self.table(torch.tensor([2, 0]))


VALUES_OF_OTHER_KINDS = {
    "a part changed in place": lambda: PartInPlace(6, 6),
    "vmap": lambda: Mapped(torch.func.vmap),
    "vmap of a gradient": lambda: Mapped(
        lambda inner: torch.func.vmap(torch.func.grad(lambda x: inner(x).tanh().sum()))
    ),
    "a sparse gradient": Table,
}


@pytest.mark.parametrize("name", VALUES_OF_OTHER_KINDS)
def test_layers_whose_values_are_of_other_kinds_pass(name):
    def make_layers():
        return [settle(VALUES_OF_OTHER_KINDS[name](), seed) for seed in range(4)]

    task = Task(make_layers, (values(1, 8, 2, 6),), values(2, 8, 2, 6))
    result, gradients = task.reference(4)

    outcomes = on_pipelines(2, task, lambda pipeline: step_task(pipeline, task), debug="values")

    for own in (gradients, *(outcome.gradients for outcome in outcomes)):
        own |= {name: gradient.to_dense() for name, gradient in own.items()}
    assert difference(outcomes, (result, gradients)) == []


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize(
    "make",
    [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, lambda tensor: tensor.to(torch.float8_e4m3fn)],
    ids=["sparse", "compressed", "float8"],
)
def test_what_a_tensor_stores_is_looked_at(make):
    finite = torch.tensor([[0.0, 1.0], [2.0, 0.0]])

    assert not_finite(make(finite)) == ""
    assert not_finite(make(finite / 0)).startswith("has 2 NaN and ")
