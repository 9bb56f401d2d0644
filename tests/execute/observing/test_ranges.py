"""Every instruction appears in a profiler's trace under its name."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from penstock.execute.observing.observer import observed
from penstock.execute.observing.ranges import Ranges, phase_of, range_name
from penstock.execute.step import Bound
from penstock.ir.instruction import Instruction, Op
from penstock.ir.operations import IS_COMPUTE
from penstock.lowering import lower
from penstock.pipeline import Pipeline
from penstock.schedules import build
from tests.support.local_pipelines import difference, float_task, step_task


def names_in_trace(call):
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        call()
    return [event.name for event in profiler.events()]


@pytest.mark.feature("A18")
def test_a_range_is_named_in_words():
    names = {
        "Forward stage 2 microbatch 5": Instruction(Op.FORWARD, 2, 5, 0, 2, 0),
        "Backward input stage 2 microbatch 5 slice 3": Instruction(Op.BACKWARD_INPUT, 2, 5, 3, 2, 0),
        "Send backward stage 2 microbatch 0": Instruction(Op.SEND_BACKWARD, 2, 0, 0, 1, 0),
        "Optimizer step stage 1": Instruction(Op.OPTIMIZER_STEP, 1, 0, 0, 1, 0),
    }

    assert [range_name(instruction) for instruction in names.values()] == list(names)


@pytest.mark.feature("A18", "X26")
@pytest.mark.slow
def test_a_traced_step_names_its_instructions_in_order():
    task, outcomes = float_task(8), []
    pipeline = Pipeline(task.make_layers(), "gpipe", 2, task.loss, ranges=True)

    found = names_in_trace(lambda: outcomes.append(step_task(pipeline, task)))

    assert [name for name in found if " stage " in name][:4] == [
        "Forward stage 0 microbatch 0",
        "Forward stage 0 microbatch 1",
        "Backward stage 0 microbatch 0",
        "Backward stage 0 microbatch 1",
    ]
    assert difference(outcomes, task.reference(2)) == []


@pytest.mark.slow
def test_a_wait_is_told_from_posting_its_receive():
    program = lower(build("gpipe", ranks=2, microbatches=1))
    first = int(program.offsets[1])
    bounds = [
        Bound(first, lambda step: None),
        Bound(first + 1, lambda step: None, first),
        Bound(first + 1, lambda step: None),
    ]

    named = observed([Ranges(torch.device("cpu"))], program, bounds)
    found = names_in_trace(lambda: [bound.call(None) for bound in named])

    assert found == [
        "warm-up", "Receive forward stage 1 microbatch 0",
        "warm-up", "Wait: Receive forward stage 1 microbatch 0",
        "warm-up", "Forward stage 1 microbatch 0",
    ]  # fmt: skip


@pytest.mark.feature("A18")
def test_a_phase_ends_with_the_first_backward_or_the_last_forward_of_its_rank():
    program = lower(build("1f1b", ranks=3, microbatches=4))
    first, end = program.offsets[:2]

    rows = [row for row in range(first, end) if IS_COMPUTE[program.op[row]]]
    found = [f"{program.instruction(row)} {phase_of(program, row)}" for row in rows]

    assert found == [
        "0F0 warm-up", "0F1 warm-up", "0F2 warm-up", "0B0 steady", "0F3 steady",
        "0B1 cool-down", "0B2 cool-down", "0B3 cool-down",
    ]  # fmt: skip
    evaluation = lower(build("1f1b", ranks=3, microbatches=4, forward_only=True))
    assert phase_of(evaluation, 0) == ""


def step_in_ranges(device):
    task = float_task(8)
    pipeline = Pipeline(task.make_layers(), "gpipe", 2, task.loss, ranges=True, device=device)

    result = pipeline.step(*[each.to(device) for each in task.inputs], target=task.target.to(device))

    assert torch.isfinite(result.loss)


def test_a_step_on_a_device_runs_in_ranges_those_of_nvtx_on_cuda(on_device):
    on_device(step_in_ranges)
