"""Layers that compute their weight gradients later by themselves: in W, in order, and once."""

import threading

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError, PipelineError, ScheduleError
from penstock.execute.split.own_weight_gradients import WEIGHT_GRADIENTS, OwnWeightGradients, fused_layers
from penstock.ir.action import Action, Kind
from penstock.ir.schedule import Schedule
from penstock.moving.dualpipe import WeightGradStore
from penstock.pipeline import Pipeline
from penstock.placement import Placement
from tests.support.local_pipelines import (
    WIDTH,
    Task,
    difference,
    error_of,
    on_ranks,
    run_task,
    square_loss,
    step_task,
    values,
    zero,
)
from tests.support.own_weight_gradients import Adding, Building, Closing, Fused, Plain, layers_of

KINDS = (Fused, Adding, Closing, Building)
SCHEDULES = ("1f1b", "zb-h1", "dualpipe", "zbv", "interleaved-zb", "dualpipe-v")


def task_of(kind, dtype=torch.float32, rows=8, num_layers=8):
    inputs, target = values(1, rows, WIDTH, dtype=dtype), values(2, rows, WIDTH, dtype=dtype)
    return Task(lambda: layers_of(kind, num_layers, dtype), (inputs,), target)


@pytest.mark.parametrize(
    "schedule", [*SCHEDULES[:3], *(pytest.param(schedule, marks=pytest.mark.slow) for schedule in SCHEDULES[3:])]
)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_plain_layers_on_one_process(kind, schedule):
    reference = task_of(Plain, torch.float64).reference(4)

    outcomes = on_ranks(2, run_task, task_of(kind, torch.float64), schedule, 4)

    assert difference(outcomes, reference, tolerance=1e-12, loss_tolerance=1e-12) == []


def hooked_gradients(kind, schedule):
    """Return what hooks of the weights see in a step of one rank; torch calls them with None, too."""
    layers = layers_of(kind, 2)
    seen = {0: [], 1: []}
    for index, layer in enumerate(layers):
        layer.weight.register_hook(lambda gradient, index=index: seen[index].append(gradient))
    task = Task(lambda: layers, (values(1, 4, WIDTH),), values(2, 4, WIDTH))
    on_ranks(1, run_task, task, schedule, 2)
    return {index: [each for each in gradients if each is not None] for index, gradients in seen.items()}


def test_hooks_see_each_gradient_of_a_fused_layer_once():
    found, expected = hooked_gradients(Fused, "zb-h1"), hooked_gradients(Plain, "1f1b")

    for index, gradients in expected.items():
        assert len(found[index]) == len(gradients) == 2
        assert all(map(torch.equal, found[index], gradients))


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_computed_in_w_and_in_a_whole_backward_at_once(kind, monkeypatch):
    seen = []

    class Seen(kind):
        def keep(self, gradient, features):
            seen.append("I")
            super().keep(gradient, features)

    monkeypatch.setattr(
        "tests.support.own_weight_gradients.weight_gradient", lambda g, x: seen.append("W") or g.t() @ x
    )

    on_ranks(1, run_task, task_of(Seen, rows=2, num_layers=1), two_then_two(), 2)
    assert seen == ["I", "I", "W", "W"]

    seen.clear()
    on_ranks(1, run_task, task_of(Seen, rows=2, num_layers=1), "1f1b", 2)
    assert seen == ["I", "W", "I", "W"]


def two_then_two(*, is_swapped=False):
    """One stage: both input gradients, then both weight gradients."""
    order = [
        Action(Kind.FORWARD, 0, 0),
        Action(Kind.FORWARD, 0, 1),
        Action(Kind.BACKWARD_INPUT, 0, 0),
        Action(Kind.BACKWARD_INPUT, 0, 1),
        Action(Kind.BACKWARD_WEIGHT, 0, 1 if is_swapped else 0),
        Action(Kind.BACKWARD_WEIGHT, 0, 0 if is_swapped else 1),
    ]
    return Schedule.from_actions("two then two", Placement.line(1), [order], num_microbatches=2)


def test_a_schedule_that_breaks_the_order_of_queues_is_refused_by_both_actions_before_a_step():
    def case(transport):
        return error_of(
            Pipeline, layers_of(Fused, 1), two_then_two(is_swapped=True), loss=square_loss, transport=transport
        )

    (error,) = on_ranks(1, case)

    assert isinstance(error, ScheduleError)
    assert "0W1" in str(error)
    assert "0I0" in str(error)


@pytest.mark.parametrize("kind", [Closing, Building])
def test_closures_run_in_any_order(kind):
    task = task_of(kind, torch.float64, rows=4, num_layers=2)
    reference = task_of(Plain, torch.float64, rows=4, num_layers=2).reference(2)

    outcomes = on_ranks(1, run_task, task, two_then_two(is_swapped=True), 2)

    assert difference(outcomes, reference, tolerance=1e-12, loss_tolerance=1e-12) == []


def test_a_fused_layer_whose_queue_is_off_takes_part_in_any_order():
    class Off(Fused):
        def keep(self, gradient, features):
            self.weight.grad = gradient.t() @ features + (0 if self.weight.grad is None else self.weight.grad)

        def need_backward_dw(self):
            return False

    reference = task_of(Plain, torch.float64, rows=4, num_layers=1).reference(2)

    outcomes = on_ranks(
        1, run_task, task_of(Off, torch.float64, rows=4, num_layers=1), two_then_two(is_swapped=True), 2
    )

    assert difference(outcomes, reference, tolerance=1e-12, loss_tolerance=1e-12) == []


@pytest.mark.parametrize("kind", [Fused, Building])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_main_gradients_miss_none_of_them(kind, schedule):
    def case(transport):
        pipeline = Pipeline(layers_of(kind, 4), schedule, 4, square_loss, transport=transport, main_gradients=True)
        step_task(pipeline, task_of(kind, num_layers=4))
        found = {name: parameter.main_grad for name, parameter in pipeline.named_parameters()}
        left = [name for name, parameter in pipeline.named_parameters() if parameter.grad is not None]
        pipeline.close()
        return found, left

    _, expected = task_of(Plain, num_layers=4).reference(4)
    for found, left in on_ranks(2, case):
        assert left == []
        for name, gradient in found.items():
            assert torch.allclose(gradient, expected[name], atol=1e-6)


class Hooked(nn.Module):
    """Has a function called in the backward."""

    def __init__(self, hook):
        super().__init__()
        self.hook = hook

    def forward(self, features):
        features = features * 1.0
        if features.requires_grad:
            features.register_hook(self.hook)
        return features


def steps(transport, where):
    """Return the errors of a step and of the next one, and the gradients of the latter; the first fails somewhere."""
    failing = [where]

    def fail_in(place):
        if failing == [place]:
            failing.clear()
            raise ValueError(f"no {place}")

    def loss(output, target):
        if float(target[0, 0]) == 1.0:
            fail_in("loss of the second microbatch")
        return square_loss(output, target)

    first, last = layers_of(Fused, 2)
    target = values(2, 4, WIDTH)
    target[0, 0], target[2, 0] = 0.0, 1.0
    pipeline = Pipeline([first, Hooked(lambda _: fail_in("backward")), last], "gpipe", 2, loss, transport=transport)
    errors = []
    for _ in range(2):
        zero(pipeline)
        try:
            pipeline.step(values(1, 4, WIDTH), target=target)
            errors.append(None)
        except PipelineError as error:
            errors.append(error)
    gradients = {name: parameter.grad for name, parameter in pipeline.named_parameters()}
    pipeline.close()
    return *errors, gradients


def test_what_a_failed_step_left_in_queues_is_thrown_away(monkeypatch):
    put, taken = [], []
    monkeypatch.setattr(Fused, "keep", lambda self, *entry: (put.append(entry), self.queue.append(entry)))
    monkeypatch.setattr(OwnWeightGradients, "_take_entry", failing_first(OwnWeightGradients._take_entry, taken))

    ((first, second, found),) = on_ranks(1, steps, "nowhere")
    ((*_, expected),) = on_ranks(1, steps, "nowhere")

    assert "no entry" in str(first)
    assert second is None
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def failing_first(method, calls):
    """The method, whose first call raises and leaves all as it is."""

    def call(*args):
        calls.append(args)
        if len(calls) == 1:
            raise ValueError("no entry")
        return method(*args)

    return call


def test_after_a_failure_in_their_own_backward_nothing_runs_any_more():
    ((first, second, _),) = on_ranks(1, steps, "backward")

    assert "no backward" in str(first)
    assert "would be added to later gradients" in str(second)


def test_outermost_fused_layers_call_those_inside():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Fused()

        def need_backward_dw(self):
            return True

        def backward_dw(self):
            self.inner.backward_dw()

    outer, lone = Outer(), Fused()

    assert fused_layers(nn.Sequential(outer, lone, nn.Linear(2, 2))) == [outer, lone]
    assert not OwnWeightGradients([nn.Linear(2, 2)])


def test_a_closure_outside_of_a_split_backward_runs_at_once():
    calls = []
    assert not WeightGradStore.enabled

    WeightGradStore.put(lambda: calls.append(1))

    assert calls == [1]


def test_threads_that_autograd_runs_for_a_device_belong_to_the_backward_under_way():
    waiting, calls = [], []

    def put():
        calls.append(WEIGHT_GRADIENTS.enabled)
        WEIGHT_GRADIENTS.put(lambda: None)

    with WEIGHT_GRADIENTS.waiting_in(waiting):
        thread = threading.Thread(target=put)
        thread.start()
        thread.join()

    assert calls == [True]
    assert len(waiting) == 1


def test_a_rank_that_is_another_thread_keeps_its_closures_to_itself():
    waiting, begun, over = [], threading.Event(), threading.Event()

    def whole_backward():
        with WEIGHT_GRADIENTS.waiting_in(None):
            begun.set()
            over.wait(10)

    thread = threading.Thread(target=whole_backward)
    thread.start()
    begun.wait(10)
    with WEIGHT_GRADIENTS.waiting_in(waiting):
        assert WEIGHT_GRADIENTS.enabled
        with WEIGHT_GRADIENTS.waiting_in(None):  # a backward within it
            assert not WEIGHT_GRADIENTS.enabled
        assert WEIGHT_GRADIENTS.enabled
    over.set()
    thread.join()
    assert not WEIGHT_GRADIENTS.enabled
    assert WEIGHT_GRADIENTS._running == {}


def test_a_builder_that_is_none_is_refused():
    from penstock.moving.torch_pipelining import PipelineStage

    error = error_of(PipelineStage, nn.Identity(), 0, 1, dw_builder=3)

    assert isinstance(error, ConfigError)
    assert "dw_builder" in str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_says_that_they_wait_by_the_layer_itself(kind):
    def case(transport):
        pipeline = Pipeline(layers_of(kind, 2), "zb-h1", 2, square_loss, transport=transport)
        for _ in range(2):
            step_task(pipeline, task_of(kind, num_layers=2))
        (found,) = [stage.split_planner.immediate for stage in pipeline.stages]
        pipeline.close()
        return found

    for found in on_ranks(2, case):
        assert (found.share, found.names, {*found.reasons.values()}) == (0.0, (), {"its layer computes it"})
