"""What stays on a rank is handed on there, a message that has come is taken once, and memory follows the program."""

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.execute.accelerator import allocator_bytes, reset_peak
from penstock.execute.observing.memory_report import MemoryWatch
from penstock.execute.ops.passes import backward, forward
from penstock.ir.operations import Op
from penstock.lowering import lower
from penstock.placement import Placement
from penstock.schedules import build
from tests.execute.test_run import drawn
from tests.support.compiled import SayingPasses, context_of, row_of, run_calls, step_for
from tests.support.local_pipelines import WIDTH, on_ranks, settle, square_loss, values

LOCAL = lower(drawn(Placement.explicit([0, 0]), "0F0 1F0 1B0 0B0"))


@pytest.mark.feature("C17")
def test_outputs_and_gradients_of_a_stage_on_this_rank_stay_here():
    value, said = torch.ones(2, requires_grad=True), []
    context = context_of(LOCAL, 0, said, passes=dict.fromkeys((0, 1), SayingPasses(said, value)))
    step = step_for(context)

    def run_row(handler, text):
        run_calls(handler(context, row_of(LOCAL, text)), step)

    run_row(forward, "0F0")
    assert said[1:] == [("note_outputs", (0, 0, 0), value, "0F0")]
    run_row(forward, "1F0")
    [(_, _, [found], _)] = said[2:]
    assert (found.is_leaf, found.requires_grad) == (True, True)
    assert torch.equal(found, value)

    # A last stage has nobody to make outputs for, and nothing comes to its backward.
    assert list(step.values.values()) == ["saved", "saved"]
    run_row(backward, "1B0")
    run_row(backward, "0B0")
    assert said[3:] == [("backward", "saved", ()), ("backward", "saved", "gradients")]
    assert step.values == {}  # nor has a first stage anybody to make gradients for


def test_a_message_that_has_come_is_taken_once_and_releases_what_has_arrived():
    program, said = lower(build("1f1b", ranks=2, microbatches=2)), []
    context = context_of(program, 0, said)
    step, receive, row = step_for(context), row_of(program, "0RECV_B1"), row_of(program, "0B1")
    step.values[context.keys.message_of(receive)] = "posted"
    step.values[context.keys.activation_of(row)] = "saved"

    wait, compute = backward(context, row)
    wait.call(step)
    assert said == [("take_gradients", "posted"), ("release", 1, 2)]
    compute.call(step)

    assert said[2:] == [("backward", "saved", "take_gradients")]
    assert step.values == {}


ROWS = 4
CHANGE = {Op.FORWARD: 1, Op.OFFLOAD: -1, Op.RELOAD: 1, Op.BACKWARD: -1}
"""Of the activations on the device."""


def layer(seed):
    """Its output is not saved: behind F it is on its way, and would stay."""
    return nn.Sequential(nn.Tanh(), settle(nn.Linear(WIDTH, WIDTH), seed))


@pytest.fixture
def samples(monkeypatch):
    """What memory reports have counted behind each call, by stage."""
    found, look = {0: [], 1: [], 2: []}, MemoryWatch._look

    def noting(self, step, moment=None):
        look(self, step, moment)
        if moment is None:
            (stage,) = self._sample(step).stages
            found[stage.stage].append((stage.num_activations, stage.activation_bytes))

    monkeypatch.setattr(MemoryWatch, "_look", noting)
    return found


@pytest.mark.parametrize("name", [pytest.param("gpipe", marks=pytest.mark.slow), "1f1b"])
def test_the_bytes_of_a_stage_follow_the_program(samples, name):
    """Of the middle stage: an activation is the input, which waits for its gradient, and the tanh."""
    schedule = ps.build(name, ranks=3, microbatches=6)
    program = ps.lower(schedule, offload=[0, 1, 2])

    def case(wires):
        pipeline = ps.Pipeline([layer(seed) for seed in range(3)], program, loss=square_loss, transport=wires)
        report = pipeline.memory_report(values(1, 6 * ROWS, WIDTH), target=values(2, 6 * ROWS, WIDTH))
        pipeline.close()
        return report.ranks[1].peak_activations

    peak, *_ = on_ranks(3, case)

    ops = [Op(op) for op in program.op[slice(*program.offsets[1:3])].tolist()]
    alive, expected = 0, []
    for op in ops:
        alive += CHANGE.get(op, 0)
        # The wait for a message is a call of its own.
        expected += [alive - CHANGE.get(op, 0)] * (op in (Op.FORWARD, Op.BACKWARD)) + [alive]
    one = 2 * 4 * ROWS * WIDTH
    assert ops.count(Op.OFFLOAD) == ops.count(Op.RELOAD) > 0
    assert samples[1] == [(count, count * one) for count in expected]
    assert peak == ps.check(program).peak_activations[1]


def allocator_gets_the_memory_back(device):
    width, microbatches = 1024 if device.type == "cuda" else 64, 6

    def peak(offload):
        program = ps.lower(ps.build("gpipe", ranks=1, microbatches=microbatches), offload=offload)
        layers = [settle(nn.Linear(width, width), seed).to(device) for seed in range(4)]
        layers = [module for each in layers for module in (each, nn.Tanh())]
        pipeline = ps.Pipeline(layers, program, loss=square_loss, device=device)
        x, y = (values(seed, microbatches * width, width).to(device) for seed in (1, 2))
        pipeline.step(x, target=y)
        before = allocator_bytes(device).allocated  # what is left of an earlier pipeline, too
        reset_peak(device)
        result = pipeline.step(x, target=y)
        gradients = [parameter.grad.clone() for parameter in pipeline.parameters()]
        return allocator_bytes(device, peak=True).allocated - before, result.losses, gradients

    (most, losses, gradients), (fewer, moved_losses, moved_gradients) = peak([]), peak([0])

    of_microbatch = 4 * 4 * width * width  # four tanhs; the input is a part of the batch
    assert most - fewer >= (microbatches - 3) * of_microbatch
    assert all(map(torch.equal, losses, moved_losses))
    assert all(map(torch.equal, gradients, moved_gradients))


def test_the_allocator_of_a_device_gets_the_memory_back(on_device):
    on_device(allocator_gets_the_memory_back)
