"""A step holds all that its calls make, and drops it if it fails."""

import pytest
import torch

from penstock.execute.batch.cutting import BatchRule
from penstock.execute.losses.step_losses import StepLosses
from penstock.execute.step import Step


def step_of():
    microbatches = BatchRule(2).microbatches((torch.arange(4),), {}, None)
    return Step([[microbatch] for microbatch in microbatches], StepLosses(2, 1), output_ranks=(0,))


class Launch:
    """Work that says what becomes of it."""

    def __init__(self):
        self.said = []

    def wait(self):
        self.said.append("waited for")

    def give_up(self):
        self.said.append("given up")


def fill(step):
    step.values[0] = "something"
    step.outputs[0, 0] = step.carried[1, 3] = "something"
    step.tickets[0] = Launch()


def held(step):
    columns = (step.values, step.outputs, step.carried, step.tickets)
    return sum(map(len, columns))


def test_a_step_that_fails_drops_all_that_it_held_and_one_that_succeeds_keeps_it():
    step, launches = step_of(), []

    def fail():
        with step:
            fill(step)
            launches.append(step.tickets[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()

    assert (held(step), step.slices) == (0, ())
    assert launches[0].said == ["given up"]
    with step_of() as step:
        fill(step)
    assert (held(step), len(step.slices)) == (4, 2)


def test_for_forwards_that_run_again_a_step_has_the_same_values_and_notes_nothing():
    step = step_of()
    step.losses.computed[0, 0] = torch.tensor(1.0)

    again = step.again()
    fill(again)

    assert step.values is again.values
    assert again.losses.computed == step.outputs == {}
    assert not again.output_ranks
