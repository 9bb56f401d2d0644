"""What is off leaves no trace in the calls of a step; all that is on at once changes no bit."""

import pytest
import torch

from penstock.errors import ConfigError
from penstock.execute.control.agreement import Mode
from penstock.pipeline import Pipeline
from tests.execute.test_overlap import backward_first
from tests.execute.test_run import PAIRS
from tests.support.local_pipelines import (
    NEARLY,
    Task,
    difference,
    error_of,
    float_layers,
    float_task,
    on_pipelines,
    outcomes_on_gloo,
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
    assert all(bound is own for bound, own in zip(compiled.bounds, compiled.bounds_with(()), strict=True))


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
