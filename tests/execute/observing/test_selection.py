"""What is off leaves no trace in the calls of a step; all that is on at once changes no bit."""

import logging

import pytest

from penstock.errors import ConfigError
from penstock.execute.control.agreement import Mode
from penstock.execute.observing.log import message_log
from penstock.execute.session import ProgramKey
from penstock.pipeline import Pipeline
from tests.execute.test_overlap import backward_first
from tests.execute.test_run import PAIRS
from tests.support.local_pipelines import difference, error_of, float_task, on_pipelines, step_task, zero


def test_what_is_off_costs_nothing():
    task = float_task(4)
    pipeline = Pipeline(task.make_layers(), "gpipe", 2, task.loss, run_ahead=3)
    compiled = pipeline._runner._programs.of(ProgramKey(Mode.TRAIN, 2, 2))

    assert pipeline._runner._observers.of_all_steps == []
    assert pipeline._runner._observers.messages is pipeline.transport
    assert all(bound is own for bound, own in zip(compiled.bounds, compiled.bounds_with(()), strict=True))
    assert logging.getLogger("penstock").getEffectiveLevel() > logging.DEBUG  # so nobody reads of messages
    assert message_log() == []


@pytest.mark.parametrize("level", ["value", "", "on"])
def test_a_debug_level_that_does_not_exist_is_refused(level):
    task = float_task(4)

    error = error_of(Pipeline, task.make_layers(), "gpipe", 2, task.loss, debug=level)

    assert isinstance(error, ConfigError)
    assert str(error).startswith(f"debug: {level!r} of type str; expected one of off, messages, values.")


def test_everything_at_once_changes_no_bit():
    task = float_task(12)

    def case(pipeline):
        step_task(pipeline, task)
        zero(pipeline)
        return step_task(pipeline, task, record=True)

    outcomes = on_pipelines(2, task, case, PAIRS, None, debug="values", ranges=True, overlap=backward_first)

    assert difference(outcomes, task.reference(3)) == []
    assert outcomes[0].timeline.makespan_s > 0
