"""The checks of tests/support/invariants.py run after every call, and find registers that do not follow the program."""

from contextlib import contextmanager

import pytest

from penstock import Observer
from penstock.schedules import build
from tests.execute.test_run import LOOP, MIXED, PAIRS
from tests.support.invariants import Invariants
from tests.support.local_pipelines import error_of, float_task, on_ranks, pipeline_of, step_task


@pytest.mark.parametrize("schedule", [LOOP, MIXED, PAIRS, build("zb-h1", ranks=2, microbatches=4, recompute=True)])
def test_every_call_of_every_step_is_checked(schedule):
    task = float_task(4 * schedule.num_microbatches)

    def case(wires):
        invariants = Invariants()
        pipeline = pipeline_of(wires, task, schedule, None, observers=[invariants])
        step_task(pipeline, task)
        pipeline.evaluate(*task.inputs, target=task.target)
        programs = pipeline._runner._programs
        calls = sum(len(compiled.bounds) for compiled in programs._compiled.values())
        return invariants.num_checks, calls + len(programs._compiled)

    for num_checks, num_calls in on_ranks(schedule.num_ranks, case):
        assert num_checks == num_calls


class Spoiling(Observer):
    """Changes the registers in the first call that it can change them in."""

    def __init__(self, spoil):
        self.spoil = spoil

    def around(self, program, bound):
        return self.spoiling

    @contextmanager
    def spoiling(self, step):
        self.spoil(step)
        yield


def drop_saved(step):
    if {0, 1} <= step.values.keys():
        del step.values[0]


def plant_output(step):
    step.values[99] = "what nobody made"


def plant_message(step):
    step.values[2] = "what nobody sends"  # behind the two slots of activations


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (drop_saved, "saved holds"),
        (plant_output, "made holds [0, 95], the program says [0]"),
        (plant_message, "received holds [0]"),
    ],
)
def test_registers_that_do_not_follow_the_program_fail_the_step(spoil, text):
    task = float_task(8)

    def case(wires):
        observers = [Invariants(), Spoiling(spoil)] if wires.rank == 0 else [Invariants()]
        step_task(pipeline_of(wires, task, observers=observers), task)

    error = error_of(on_ranks, 2, case)

    assert "Wrong: after 0" in str(error)
    assert text in str(error)
