"""The loop runs drawn orders with the gradients of one process, and keeps nothing alive behind a step."""

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock.errors import PipelineError
from penstock.execute.control.agreement import Mode
from penstock.execute.lost_device import living_instances
from penstock.execute.session import ProgramKey
from penstock.execute.stages.passes import SavedForward
from penstock.ir.action import OverlappedPair
from penstock.ir.schedule import Schedule
from penstock.pipeline import Pipeline
from penstock.placement import Placement
from tests.support.actions import parse_action
from tests.support.local_pipelines import (
    WIDTH,
    Task,
    block,
    difference,
    error_of,
    float_task,
    on_ranks,
    run_task,
    step_task,
    values,
)


def drawn(placement, *orders):
    """Make a schedule from one line of actions per rank."""
    actions = [[parse_action(text) for text in order.split()] for order in orders]
    microbatches = {a.microbatch for order in actions for entry in order for a in members(entry)}
    return Schedule.from_actions("drawn", placement, actions, num_microbatches=len(microbatches))


def members(entry):
    return (entry.first, entry.second) if isinstance(entry, OverlappedPair) else (entry,)


LOOP = drawn(
    Placement.loop(2, 4),
    "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
    "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
)
SPLIT = drawn(
    Placement.line(2),
    "0F0 0F1 0I0 0W0 0I1 0W1",
    "1F0 1I0 1F1 1I1 1W0 1W1",
)
MIXED = drawn(
    Placement.explicit([0, 0, 1, 0]),
    "0F0 1F0 0F1 1F1 3F0 3I0 3F1 3B1 1B0 0B0 3W0 1I1 1W1 0B1",
    "2F0 2F1 2I0 2W0 2B1",
)
PAIRS = drawn(
    Placement.line(2),
    "0F0 0F1 (0F2;0B0)OVERLAP_F_B 0B1 0B2",
    "1F0 (1F1;1B0)OVERLAP_F_B (1F2;1B1)OVERLAP_F_B 1B2",
)
OUT_OF_ORDER = drawn(Placement.line(2), "0F2 0F0 0F1 0B1 0B0 0B2", "1F2 1F0 1F1 1B1 1B0 1B2")


@pytest.mark.feature("X46")
@pytest.mark.parametrize(
    "schedule",
    [LOOP, SPLIT, MIXED, PAIRS, OUT_OF_ORDER],
    ids=["loop", "split backward", "mixed", "pairs", "out of order"],
)
def test_a_drawn_schedule_in_order_of_microbatches_is_bitwise_right_and_another_up_to_rounding(schedule):
    task = float_task(4 * schedule.num_microbatches, torch.float64)
    tolerance = 1e-12 if schedule is OUT_OF_ORDER else None

    outcomes = on_ranks(schedule.num_ranks, lambda wires: run_task(wires, task, schedule, None))

    assert difference(outcomes, task.reference(schedule.num_microbatches), tolerance=tolerance) == []


# ---- memory


@pytest.mark.feature("D8")
def test_a_failed_step_keeps_nothing_alive_though_its_error_is_kept():
    task = float_task(8)
    calls = []

    def loss(output, target):
        calls.append(1)
        return task.loss(output, target) if len(calls) != 3 else None

    pipeline = Pipeline(task.make_layers(), "gpipe", 4, loss)
    error = error_of(step_task, pipeline, task)

    assert error.__traceback__ is not None
    gc.collect()
    assert not living_instances(SavedForward)


@pytest.mark.feature("D7")
def test_what_a_program_does_not_free_is_an_error():
    task = float_task(4)
    pipeline = Pipeline(task.make_layers(), "gpipe", 2, task.loss)
    runner, program = pipeline._runner, pipeline.program
    compiled = runner._programs.of(ProgramKey(Mode.TRAIN, 2, 2))
    bounds = [bound for bound in compiled.bounds if "0B1" not in str(program.instruction(bound.row))]
    runner._programs._compiled[ProgramKey(Mode.TRAIN, 2, 2), False] = replace(compiled, bounds=bounds)

    error = error_of(step_task, pipeline, task)

    assert isinstance(error, PipelineError)
    assert "1 values stay alive behind the step: saved activation of 0F1;" in str(error)


# ---- what crosses a border


class Counting(nn.Module):
    """Returns a buffer that its next forward changes, or a copy of it."""

    def __init__(self, returns_copy):
        super().__init__()
        self.returns_copy = returns_copy
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x):
        self.total += x.detach().mean(0)
        return x, self.total.clone() if self.returns_copy else self.total


class Using(nn.Module):
    def forward(self, state):
        return state[0] * 2 + state[1]


@pytest.mark.parametrize("returns_copy", [True, False])
def test_an_output_that_its_stage_changes_before_it_is_used_is_an_error_and_a_copy_is_right(returns_copy):
    """Rank 0 runs two forwards of stage 0 before the first one's output is used."""
    task = Task(lambda: [Counting(returns_copy), Using(), block(1)], (values(1, 4, WIDTH),), values(2, 4, WIDTH))
    schedule = drawn(Placement.explicit([0, 0, 1]), "0F0 0F1 1F0 1F1 1B0 0B0 1B1 0B1", "2F0 2B0 2F1 2B1")

    def case(wires):
        try:
            return run_task(wires, task, schedule, 2)
        except PipelineError as error:
            return str(error)

    first, second = on_ranks(2, case)

    if returns_copy:
        assert difference([first, second], task.reference(2)) == []
    else:
        assert "rank 0, 1F0: PipelineError: 0F0: a tensor of its output was changed in place" in first
        assert "rank 0 is the culprit" in second


class ChangingInBackward(nn.Module):
    """Changes the tensor that it returned last when the backward of any microbatch passes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        outputs, self.last = self.linear(x), torch.zeros(WIDTH)
        outputs.register_hook(self._change)
        return outputs, self.last

    def _change(self, gradient):
        self.last += 1


def test_an_output_that_is_changed_before_it_is_sent_is_not_sent():
    task = Task(lambda: [ChangingInBackward(), Using()], (values(1, 6, WIDTH),), values(2, 6, WIDTH))

    # 0F2 and 0B0 come before the send of 0F2.
    first, second = on_ranks(2, lambda wires: error_of(run_task, wires, task, PAIRS, 3))

    assert "rank 0, 0SEND_F2: PipelineError: 0F2: a tensor of its output was changed in place" in str(first)
    assert "rank 0 is the culprit" in str(second)
