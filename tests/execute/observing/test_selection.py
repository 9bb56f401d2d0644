"""What is off leaves no trace in the calls of a step; all that is on at once changes no bit."""

import pytest
import torch

from penstock.errors import ConfigError, PipelineError
from penstock.execute.control.agreement import Mode
from penstock.ir.live import peak_activations
from penstock.pipeline import Pipeline
from penstock.schedules import build
from tests.execute.test_overlap import backward_first
from tests.execute.test_run import PAIRS
from tests.local_pipelines import (
    NEARLY,
    Task,
    difference,
    error_of,
    float_layers,
    float_task,
    on_pipelines,
    on_ranks,
    outcomes_on_gloo,
    pipeline_of,
    second_step,
    step_task,
    zero,
)


def test_what_is_off_costs_nothing():
    task = float_task(4)
    pipeline = Pipeline(task.make_layers(), "gpipe", 2, task.loss, run_ahead=3)
    compiled = pipeline._runner._programs.of(Mode.TRAIN, 2)

    assert pipeline._runner._observers.of_all_steps == []
    assert pipeline._runner._observers.messages is pipeline.transport
    assert all(bound is own for bound, own in zip(compiled.bounds, compiled.plain, strict=True))


@pytest.mark.parametrize("level", ["value", "", "on"])
def test_a_debug_level_that_does_not_exist_is_refused(level):
    task = float_task(4)

    error = error_of(Pipeline, task.make_layers(), "gpipe", 2, task.loss, debug=level)

    assert isinstance(error, ConfigError)
    assert str(error).startswith(f"debug: {level!r} of type str; expected one of off, messages, values.")


def test_everything_at_once_changes_no_bit():
    task = float_task(12)

    def two_steps(pipeline):
        step_task(pipeline, task)
        zero(pipeline)
        return step_task(pipeline, task, record=True)

    outcomes = on_pipelines(2, task, two_steps, PAIRS, None, debug="values", ranges=True, overlap=backward_first)

    assert difference(outcomes, task.reference(3)) == []
    assert outcomes[0].timeline.makespan_s > 0


def test_a_pair_that_is_looked_at_still_names_its_own_computation():
    task = float_task(12)

    def case(wires):
        layers = task.make_layers()
        layers[-1].register_full_backward_hook(lambda module, inputs, outputs: 1 / 0)
        pipeline = Pipeline(layers, PAIRS, loss=task.loss, transport=wires, debug="values", overlap=backward_first)
        step_task(pipeline, task)

    error = error_of(on_ranks, 2, case)

    assert isinstance(error, PipelineError)
    assert "rank 1, 1B0: ZeroDivisionError" in str(error)


def test_steps_are_counted_through_failures():
    task = float_task(8)
    schedule = build("1f1b", ranks=2, microbatches=4)
    calls = []

    def loss(output, target):
        calls.append(1)
        return task.loss(output, target) if len(calls) != 2 else None

    def case(wires):
        pipeline = Pipeline(task.make_layers(), schedule, loss=loss, transport=wires, debug="messages")
        error_of(step_task, pipeline, task)
        step_task(pipeline, task)
        return pipeline._runner._num_attempts

    assert on_ranks(2, case) == [2, 2]


# ---- on gloo

LEVELS = ["off", "messages", "values"]
SCHEDULES = [("1f1b", 5), ("zbv", 4), ("dualpipe", 4)]


def cases():
    return [(deep_task(number), name, number, {"debug": level}) for name, number in SCHEDULES for level in LEVELS]


@pytest.mark.slow
def test_debug_levels_on_gloo_change_no_bit(two_ranks):
    per_rank = two_ranks.run(outcomes_on_gloo, cases, second_step, timeout_s=60.0)

    for case, outcomes in zip(cases(), zip(*per_rank, strict=True), strict=True):
        task, *_, num_microbatches, options = case
        if options["debug"] == "off":
            plain = outcomes
            assert difference(plain, task.reference(num_microbatches), **NEARLY) == [], case
        for outcome, expected in zip(outcomes, plain, strict=True):
            assert difference([outcome], (expected.result, expected.gradients)) == [], case


def deep_task(num_microbatches):
    task = float_task(2 * num_microbatches, torch.float64)
    return Task(lambda: float_layers(torch.float64, 6), task.inputs, task.target)


@pytest.mark.slow
def test_on_gloo_a_value_that_is_not_finite_ends_the_step_on_all_ranks_with_its_maker(two_ranks):
    first, second = two_ranks.run(step_with_a_nan, timeout_s=60.0)

    told = "PipelineError: 1F2: the output of layer '3.1' has"
    assert f"rank 1 is the culprit: in 1F2, in layer 3 (Sequential), it raised {told}" in first
    assert f"rank 1, 1F2, in layer 3 (Sequential): {told}" in second


def step_with_a_nan(rank):
    task = deep_task(4)
    layers = task.make_layers()
    calls = []

    def spoil(module, args, output):
        calls.append(1)
        return output * float("nan") if len(calls) == 3 else output

    layers[3][1].register_forward_hook(spoil)
    pipeline = Pipeline(layers, "1f1b", 4, task.loss, debug="values")
    error = error_of(step_task, pipeline, task)
    pipeline.close()
    return str(error)


@pytest.mark.slow
def test_on_gloo_every_rank_gets_the_memory_of_all(two_ranks):
    first, second = two_ranks.run(memory_on_gloo, timeout_s=60.0)

    assert first == second
    assert [rank.peak_activations for rank in first] == peak_activations(build("zb-h2", ranks=2, microbatches=4))


def memory_on_gloo(rank):
    task = deep_task(4)
    with pipeline_of(None, task, "zb-h2") as pipeline:
        return pipeline.memory_report(*task.inputs, target=task.target).ranks
