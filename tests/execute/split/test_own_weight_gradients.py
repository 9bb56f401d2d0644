"""Layers that compute their weight gradients later by themselves: in W, in order, and once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError, PipelineError, ScheduleError
from penstock.execute.split.own_weight_gradients import WEIGHT_GRADIENTS, OwnWeightGradients, fused_layers
from penstock.moving.dualpipe import WeightGradStore
from penstock.pipeline import Pipeline
from penstock.placement import Placement
from tests.execute.test_run import drawn
from tests.support.local_pipelines import (
    NEARLY,
    WIDTH,
    Task,
    assert_errors,
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
from tests.support.using import Using

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

    assert difference(outcomes, reference, **NEARLY) == []


def hooked_gradients(kind, schedule):
    """Return what hooks of the weights see in a step of one rank; torch calls them with None, too."""
    layers, seen = layers_of(kind, 2), ([], [])
    for layer, gradients in zip(layers, seen, strict=True):
        layer.weight.register_hook(gradients.append)
    task = Task(lambda: layers, (values(1, 4, WIDTH),), values(2, 4, WIDTH))
    on_ranks(1, run_task, task, schedule, 2)
    return [[each for each in gradients if each is not None] for gradients in seen]


def test_hooks_see_each_gradient_of_a_fused_layer_once():
    found, expected = hooked_gradients(Fused, "zb-h1"), hooked_gradients(Plain, "1f1b")

    assert [len(gradients) for gradients in expected] == [2, 2]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


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

    on_ranks(1, run_task, task_of(Seen, rows=2, num_layers=1), IN_ORDER, 2)
    assert seen == ["I", "I", "W", "W"]

    seen.clear()
    on_ranks(1, run_task, task_of(Seen, rows=2, num_layers=1), "1f1b", 2)
    assert seen == ["I", "W", "I", "W"]


IN_ORDER, SWAPPED = (drawn(Placement.line(1), f"0F0 0F1 0I0 0I1 {weights}") for weights in ("0W0 0W1", "0W1 0W0"))
"""One stage: both input gradients, then both weight gradients."""


def test_a_schedule_that_breaks_the_order_of_queues_is_refused_by_both_actions_before_a_step():
    error = error_of(Pipeline, layers_of(Fused, 1), SWAPPED, loss=square_loss)

    assert_errors([error], ScheduleError, "0W1", "0I0")


class Off(Fused):
    """A fused layer whose queue is off."""

    def keep(self, gradient, features):
        self.weight.grad = gradient.t() @ features + (0 if self.weight.grad is None else self.weight.grad)

    def need_backward_dw(self):
        return False


@pytest.mark.parametrize("kind", [Closing, Building, Off])
def test_closures_and_layers_whose_queue_is_off_take_part_in_any_order(kind):
    task, plain = (task_of(each, torch.float64, rows=4, num_layers=2) for each in (kind, Plain))

    outcomes = on_ranks(1, run_task, task, SWAPPED, 2)

    assert difference(outcomes, plain.reference(2), **NEARLY) == []


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


def hooked(self, features):
    """Have a function called in the backward."""
    features = features * 1.0
    if features.requires_grad:
        features.register_hook(self.hook)
    return features


def steps(transport, *failures):
    """Return the errors of a step and of the next one, and the gradients of the latter; failures come in backwards."""

    def hook(gradient):
        if failing:
            raise failing.pop()

    failing, (first, last) = [*failures], layers_of(Fused, 2)
    pipeline = Pipeline([first, Using(hooked, hook=hook), last], "gpipe", 2, square_loss, transport=transport)
    errors = []
    for _ in range(2):
        zero(pipeline)
        try:
            pipeline.step(values(1, 4, WIDTH), target=values(2, 4, WIDTH))
            errors.append(None)
        except PipelineError as error:
            errors.append(error)
    gradients = {name: parameter.grad for name, parameter in pipeline.named_parameters()}
    pipeline.close()
    return *errors, gradients


def test_what_a_failed_step_left_in_queues_is_thrown_away(monkeypatch):
    answers = chain([ValueError("no entry")], repeat(DEFAULT))
    take = Mock(side_effect=answers, wraps=OwnWeightGradients._take_entry)
    monkeypatch.setattr(OwnWeightGradients, "_take_entry", lambda *args: take(*args))

    ((first, second, found),) = on_ranks(1, steps)
    ((*_, expected),) = on_ranks(1, steps)

    assert "no entry" in str(first)
    assert second is None
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_after_a_failure_in_their_own_backward_nothing_runs_any_more():
    ((first, second, _),) = on_ranks(1, steps, ValueError("no backward"))

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
    def put():
        WEIGHT_GRADIENTS.put(lambda: None)
        return WEIGHT_GRADIENTS.enabled

    waiting = []
    with WEIGHT_GRADIENTS.waiting_in(waiting), ThreadPoolExecutor() as threads:
        assert threads.submit(put).result()

    assert len(waiting) == 1


def test_a_rank_that_is_another_thread_keeps_its_closures_to_itself():
    begun, over = threading.Event(), threading.Event()

    def whole_backward():
        with WEIGHT_GRADIENTS.waiting_in(None):
            begun.set()
            over.wait(10)

    with ThreadPoolExecutor() as threads:
        threads.submit(whole_backward)
        begun.wait(10)
        with WEIGHT_GRADIENTS.waiting_in([]):
            assert WEIGHT_GRADIENTS.enabled
            with WEIGHT_GRADIENTS.waiting_in(None):  # a backward within it
                assert not WEIGHT_GRADIENTS.enabled
            assert WEIGHT_GRADIENTS.enabled
        over.set()
    assert not WEIGHT_GRADIENTS.enabled
    assert WEIGHT_GRADIENTS._running == {}


def test_a_builder_that_is_none_is_refused():
    from penstock.moving.torch_pipelining import PipelineStage

    with pytest.raises(ConfigError, match="dw_builder"):
        PipelineStage(nn.Identity(), 0, 1, dw_builder=3)


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
