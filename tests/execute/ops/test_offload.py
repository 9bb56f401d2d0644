"""OFFLOAD frees as many bytes of a stage as the model of memory says, and RELOAD takes them again."""

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.execute.accelerator import allocator_bytes, reset_peak
from penstock.execute.observing.memory_report import MemoryWatch
from penstock.ir.operations import Op
from tests.local_pipelines import WIDTH, on_ranks, settle, square_loss, values

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


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
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
