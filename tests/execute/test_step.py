"""A step holds all that its calls make, and drops it if it fails."""

import pytest
import torch

from penstock.execute.batch.cutting import BatchRule
from penstock.execute.losses.step_losses import StepLosses
from penstock.execute.step import RegisterCounts, Step


def step_of():
    microbatches = BatchRule(2).microbatches((torch.arange(4),), {}, None)
    step = Step([[microbatch] for microbatch in microbatches], StepLosses(2, 1), keeps_outputs=True)
    step.make_registers(RegisterCounts(saved=3, received=2, outgoing=1))
    return step


def fill(step):
    step.saved[0] = step.received[1] = step.inputs[1] = step.outgoing[0] = "something"
    step.outputs[0, 0] = step.local[3] = step.carried[1, 3] = step.first_gradients[0] = "something"


def held(step):
    columns = (step.saved, step.received, step.inputs, step.outgoing)
    dicts = (step.outputs, step.local, step.carried, step.first_gradients)
    return sum(value is not None for column in columns for value in column) + sum(map(len, dicts))


def test_there_is_an_empty_register_for_every_slot():
    step = step_of()

    assert [len(column) for column in (step.saved, step.received, step.inputs, step.outgoing)] == [3, 2, 2, 1]
    assert held(step) == 0


def test_two_steps_collect_apart():
    first, second = step_of(), step_of()

    fill(first)

    assert held(first) == 8
    assert held(second) == 0


def test_a_step_that_fails_drops_all_that_it_held():
    step = step_of()

    def fail():
        with step:
            fill(step)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()

    assert held(step) == 0
    assert step.slices == ()


def test_a_step_that_succeeds_keeps_what_it_has():
    with step_of() as step:
        fill(step)

    assert held(step) == 8
    assert len(step.slices) == 2


def test_for_forwards_that_run_again_a_step_has_the_same_registers_and_notes_nothing():
    step = step_of()
    step.losses.computed[0, 0] = torch.tensor(1.0)

    again = step.again()
    fill(again)

    assert step.saved is again.saved
    assert again.losses.computed == step.outputs == {}
    assert not again.keeps_outputs
