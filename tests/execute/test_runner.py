"""The runner plans each mode once, runs it, and starts afresh behind a failed step."""

import torch

from penstock.execute.batch.agreement import Mode
from penstock.execute.batch.gate import Call
from penstock.execute.losses.loss import LossWeights
from penstock.execute.options import PipelineOptions
from penstock.execute.runner import Runner
from penstock.execute.stages.assemble import assemble
from penstock.execute.transport import LocalTransport
from penstock.partition.split import split_over
from penstock.plan import prove_and_lower
from penstock.schedules import build
from tests.local_pipelines import error_of, float_task, square_loss

CPU = torch.device("cpu")


def runner_of(task, planned, loss=square_loss):
    schedule = build("1f1b", ranks=1, microbatches=4)
    [transport] = LocalTransport.create(1, 20.0)
    layers = task.make_layers()
    assembly = assemble(layers, schedule.placement, split_over(schedule.placement, len(layers)), 0, device=CPU)

    def program_of(mode):
        planned.append(mode)
        return prove_and_lower(schedule if mode.is_training else schedule.forward_only())

    options = PipelineOptions()
    return Runner(
        transport, CPU, schedule, assembly, options, loss=loss, loss_weights=LossWeights(), program_of=program_of
    )


def test_each_mode_is_planned_once_when_it_first_runs():
    task, planned = float_task(8), []
    runner = runner_of(task, planned)

    for mode in (Mode.TRAIN, Mode.EVALUATE, Mode.TRAIN, Mode.EVALUATE):
        runner.run(mode, Call(task.inputs, target=task.target))

    assert planned == [Mode.TRAIN, Mode.EVALUATE]


def test_a_step_runs_behind_a_failed_one_as_if_it_had_not_been():
    task, calls = float_task(8), []

    def loss(output, target):
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("the third microbatch is bad")
        return square_loss(output, target)

    runner = runner_of(task, [], loss)
    call = Call(task.inputs, target=task.target)
    error = error_of(runner.run, Mode.TRAIN, call)
    result = runner.run(Mode.TRAIN, call)

    assert "rank 0, 0F2: ValueError: the third microbatch is bad" in str(error)
    assert torch.equal(result.loss, task.reference(4)[0].loss)
