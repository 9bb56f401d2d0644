"""Pipelines whose ranks are threads of the test's process, small models for them, and the comparison with one process.

Threads share torch's generator, so every value here is drawn from a generator of its own.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from penstock.errors import DeadlineExceeded, PeerLost
from penstock.execute.transport import LocalTransport
from penstock.ir.action import Action, Kind
from penstock.ir.schedule import Schedule
from penstock.pipeline import Pipeline
from penstock.placement import Placement
from tests.support.reference import reference_step

MAX_WAIT_S = 20.0
WIDTH = 6
VOCABULARY = 11
LENGTH = 3
IGNORED = -100
NEARLY = {"tolerance": 1e-12, "loss_tolerance": 1e-12}


def on_ranks(num_ranks, case, *args, deadline_s=MAX_WAIT_S, connect=LocalTransport.create):
    """Return what `case(transport, *args)` returned on every rank; raise the error of the rank that is to blame."""
    return on_threads(connect(num_ranks, deadline_s), case, *args)


def on_threads(places, case, *args):
    """Do the same on given transports, or on the places of a mesh."""
    with ThreadPoolExecutor(len(places)) as threads:
        futures = [threads.submit(_run, case, place, args) for place in places]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, (PeerLost, DeadlineExceeded))):
        raise error
    return [future.result() for future in futures]


def _run(case, place, args):
    try:
        return case(place, *args)
    except BaseException:
        place.abort()  # the other ranks must not wait for this one
        raise


def error_of(call, *args, **kwargs):
    """Return what a call raises."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def settle(module, seed):
    """Give a module's parameters values that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.4)
    return module


def block(seed, dtype=torch.float32, width=WIDTH):
    return settle(
        nn.Sequential(nn.LayerNorm(width, dtype=dtype), nn.Linear(width, width, dtype=dtype), nn.Tanh()), seed
    )


class Around(nn.Module):
    """A layer with a block; subclasses have their own forward."""

    def __init__(self, seed, dtype=torch.float32):
        super().__init__()
        self.inner = block(seed, dtype)


class Masked(Around):
    """A layer that takes keywords."""

    def forward(self, x, *, mask=None, scale=1.0):
        return self.inner(x) * scale if mask is None else self.inner(x) * mask * scale


def float_layers(dtype=torch.float32, num_layers=5):
    return [block(seed, dtype) for seed in range(num_layers)]


def token_layers(dtype=torch.float32, num_blocks=3):
    embedding = settle(nn.Embedding(VOCABULARY, WIDTH, dtype=dtype), 100)
    head = settle(nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype), 101)
    return [embedding, *float_layers(dtype, num_blocks), head]


def values(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def square_loss(output, target):
    return ((output - target) ** 2).mean()


def token_loss(output, target):
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=IGNORED)


def count_tokens(target):
    return int((target != IGNORED).sum())


def two_routes(num_ranks, num_microbatches):
    """All forwards, then all backwards; odd microbatches travel the second route."""
    placement = Placement.bidirectional(num_ranks)
    routes = np.arange(num_microbatches) % 2
    orders = []
    for own in placement.stages_of_rank:
        passes = [(kind, stage) for kind in (Kind.FORWARD, Kind.BACKWARD) for stage in own]
        travellers = [np.flatnonzero(routes == placement.route_of_stage[stage]).tolist() for _, stage in passes]
        orders.append([Action(*pair, b) for pair, own in zip(passes, travellers, strict=True) for b in own])
    return Schedule.from_actions(
        "two routes", placement, orders, num_microbatches=num_microbatches, route_of_microbatch=routes
    )


@dataclass
class Task:
    """A model, a batch and a loss."""

    make_layers: Any
    inputs: tuple
    target: Any
    loss: Any = square_loss
    options: dict = field(default_factory=dict)
    keywords: dict = field(default_factory=dict)
    """Of the layers."""

    def reference(self, num_microbatches, num_steps=1):
        """What one process computes in steps that add up: the result of the last one, and the gradients by name."""
        layers = self.make_layers()
        for number in range(num_steps):
            result = reference_step(
                layers,
                self.inputs,
                self.keywords,
                self.target,
                loss=self.loss,
                num_microbatches=num_microbatches,
                step_number=number,
                **self.options,
            )
        return result, gradients_of(named(layers))


def float_task(rows, dtype=torch.float32):
    """Mean squares of an even batch."""
    inputs, target = values(1, rows, WIDTH, dtype=dtype), values(2, rows, WIDTH, dtype=dtype)
    return Task(lambda: float_layers(dtype), (inputs,), target)


def token_task(rows, dtype=torch.float32):
    """Mean over tokens, some of which do not count, of a batch that need not divide evenly."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    target = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    target[::2, 1:] = IGNORED
    options = {"allow_ragged": True, "count": count_tokens}
    return Task(lambda: token_layers(dtype), (tokens,), target, token_loss, options)


def named(layers):
    return [(f"{index}.{name}", p) for index, layer in enumerate(layers) for name, p in layer.named_parameters()]


def gradients_of(named_parameters):
    return {name: None if p.grad is None else p.grad.clone() for name, p in named_parameters}


def zero(pipeline):
    """Remove the gradients of a pipeline."""
    for each in pipeline.parameters():
        each.grad = None


@dataclass
class Outcome:
    """What one rank saw of a step."""

    result: Any
    gradients: dict
    timeline: Any = None


def outcome_of(pipeline, result):
    return Outcome(result, gradients_of(pipeline.named_parameters()), pipeline.timeline)


def pipeline_of(transport, task, schedule="1f1b", num_microbatches=4, **options):
    """A pipeline for a task; the options come before the task's own."""
    return Pipeline(
        task.make_layers(), schedule, num_microbatches, task.loss, transport=transport, **(task.options | options)
    )


def on_pipelines(num_ranks, task, body, schedule="1f1b", num_microbatches=4, **options):
    """Return what `body(pipeline)` returned on every rank, each with a pipeline for a task."""
    return on_ranks(num_ranks, lambda wires: body(pipeline_of(wires, task, schedule, num_microbatches, **options)))


def second_step(pipeline, task):
    """The outcome of a second step from zero gradients, in which shapes are known and receives are posted ahead."""
    step_task(pipeline, task)
    zero(pipeline)
    return step_task(pipeline, task)


def two_steps(pipeline, task):
    """The outcome of two steps without zeroing in between."""
    step_task(pipeline, task)
    return step_task(pipeline, task)


def mistakes(task, schedule, **options):
    """How two steps without zeroing in between, the second on known shapes, differ from twice the unsplit model."""
    result, gradients = task.reference(schedule.num_microbatches)
    twice = {name: None if gradient is None else 2 * gradient for name, gradient in gradients.items()}
    outcomes = on_pipelines(schedule.num_ranks, task, lambda own: two_steps(own, task), schedule, None, **options)
    return difference(outcomes, (result, twice), **NEARLY)


def errors_before_a_right_step(num_ranks, task, wrong, schedule="1f1b", num_microbatches=4, **options):
    """Return what `wrong(pipeline)` raised on every rank; the next step must be right."""

    def case(pipeline):
        error = error_of(wrong, pipeline)
        zero(pipeline)
        return error, step_task(pipeline, task)

    found = on_pipelines(num_ranks, task, case, schedule, num_microbatches, **options)
    assert difference([outcome for _, outcome in found], task.reference(num_microbatches)) == []
    return [error for error, _ in found]


def assert_errors(errors, kind, *texts):
    """Every rank has an error of this type and with these texts."""
    for error in errors:
        assert isinstance(error, kind)
        assert [text for text in texts if text not in str(error)] == []


def assert_gradients(found_on_ranks, layers):
    """Every rank has the gradients of these layers bit for bit, and together the ranks have all."""
    expected = gradients_of(named(layers))
    for found in found_on_ranks:
        assert [name for name in found if not is_same(found[name], expected[name])] == []
    assert {name for found in found_on_ranks for name in found} == expected.keys()


def run_task(transport, task, schedule, num_microbatches, **options):
    """Run one step of a task on this rank; only ranks that need them get inputs and target."""
    pipeline = pipeline_of(transport, task, schedule, num_microbatches, **options)
    outcome = step_task(pipeline, task)
    pipeline.close()
    return outcome


def step_task(pipeline, task, **options):
    placement = pipeline.schedule.placement
    is_first = any(placement.previous_stage[stage.index] < 0 for stage in pipeline.stages)
    is_last = any(placement.next_stage[stage.index] < 0 for stage in pipeline.stages)
    args = task.inputs if is_first else ()
    target = task.target if is_last else None
    return outcome_of(pipeline, pipeline.step(*args, target=target, return_outputs=True, **task.keywords, **options))


def difference(outcomes, reference, *, tolerance=None, loss_tolerance=None):
    """Say how the ranks' outcomes differ from the reference's; empty where they are equal bit for bit (or nearly)."""
    expected, expected_gradients = reference
    found = []
    names = {name for outcome in outcomes for name in outcome.gradients}
    if names != expected_gradients.keys():
        found.append(f"parameters {sorted(names ^ expected_gradients.keys())}")
    for rank, outcome in enumerate(outcomes):
        for name in outcome.gradients.keys() & expected_gradients.keys():
            if not is_same(outcome.gradients[name], expected_gradients[name], tolerance):
                found.append(f"the gradient of {name} on rank {rank}")
        losses, wanted = losses_of(outcome.result), losses_of(expected)
        for name in losses.keys() | wanted.keys():
            if name not in losses or not is_same(losses[name], wanted.get(name), loss_tolerance):
                found.append(f"{name} on rank {rank}")
    return found


def losses_of(result):
    """All losses of a result, by what they are."""
    ones = {"the loss": result.loss, "the total": result.total}
    ones |= {f"the loss of microbatch {index}": loss for index, loss in enumerate(result.losses)}
    return ones | {f"the loss {name}": loss for name, loss in result.named_losses.items()}


def same_outcomes(ours, theirs):
    """Whether ranks saw the same bit for bit: losses, gradients and outputs."""
    return all(map(_saw_the_same, ours, theirs))


def _saw_the_same(*outcomes):
    one, other = (losses_of(each.result) | each.gradients | {"the outputs": each.result.outputs} for each in outcomes)
    return one.keys() == other.keys() and all(is_same(one[name], other[name]) for name in one)


def outcomes_on_gloo(rank, cases, body):
    found = []
    for task, schedule, num_microbatches, options in cases():
        with pipeline_of(None, task, schedule, num_microbatches, **options) as pipeline:
            found.append(body(pipeline, task))
            found[-1].timeline = None
    return found


def differences_on_gloo(ranks, cases, body=step_task, **tolerances):
    """How `body(pipeline, task)` on processes differs from one process, in each case.

    `cases`, a function at the top of its module, lists task, schedule, number of microbatches and options.
    """
    per_rank = ranks.run(outcomes_on_gloo, cases, body, timeout_s=60.0)
    references = [task.reference(num_microbatches) for task, _, num_microbatches, _ in cases()]
    pairs = zip(zip(*per_rank, strict=True), references, strict=True)
    return [difference(outcomes, reference, **tolerances) for outcomes, reference in pairs]


def visits_in_order(schedule):
    """Whether every stage adds up its gradients microbatch by microbatch, as one process does."""
    if schedule.num_slices > 1 or len(schedule.placement.routes) > 1:
        return False
    for stage, last in product(range(schedule.num_stages), (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)):
        rows = (schedule.stage == stage) & np.isin(schedule.kind, (Kind.BACKWARD, last))
        if (np.diff(schedule.microbatch[rows]) < 0).any():
            return False
    return True


def is_same(found, wanted, tolerance=None):
    """Whether two tensors, or None, are equal bit for bit, or nearly; one that is not a number is equal to another."""
    if found is None or wanted is None:
        return found is wanted
    near = {"rtol": tolerance or 0.0, "atol": tolerance or 0.0, "equal_nan": True}
    return found.dtype == wanted.dtype and found.shape == wanted.shape and torch.allclose(found, wanted, **near)
