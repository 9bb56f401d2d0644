"""What a memory report counts is what the device's allocator has given out, and its prediction the allocator's peak."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from penstock.execute.accelerator import allocator_bytes
from penstock.execute.batch.local_batch import StepRequest
from penstock.execute.control.agreement import Mode
from penstock.execute.observing.memory_report import MemoryWatch
from penstock.execute.observing.rank_memory import Moment, RankMemory
from penstock.execute.transport.device_queue import device_queue_of
from penstock.pipeline import Pipeline
from penstock.schedules import build
from tests.emulated.pipelines import DRAWING, transport_of
from tests.emulated.runtime import RUNTIME

pytestmark = pytest.mark.emulated

WIDTH, ROWS = 128, 16  # of a microbatch
NUM_MICROBATCHES = 4
LAYERS_PER_RANK = 20
"""So many that what one of them takes and gives back is little beside what a rank holds."""
NUMBER_BYTES = 8 * NUM_MICROBATCHES
"""The losses of a step have at most so many; they are left out."""


@dataclass(frozen=True)
class Held:
    """A training whose memory is looked at."""

    family: str
    num_ranks: int
    run_ahead: int | None = 2
    offload: tuple = ()
    """Stages whose activations wait in the memory of the host."""

    def __str__(self):
        return f"{self.family}, {self.num_ranks} ranks, run_ahead={self.run_ahead}"


@dataclass
class Looked:
    """What one rank has found."""

    differences: list
    """Look by look, the bytes that the allocator has given out and that neither report nor optimizer has."""
    own: RankMemory
    predicted_bytes: int
    peak_bytes: int
    """The most that the allocator has given out in a step without a report."""
    input_bytes: int
    target_bytes: int


class Shifted(nn.Module):
    """A product whose bias is a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, hidden):
        return torch.tanh(nn.functional.linear(hidden, self.weight, self.shift))


class AllocatorLook(MemoryWatch):
    """Notes at each look what the allocator has given out, without what it rounds up, and the report does not have."""

    def __init__(self, *args):
        super().__init__(*args)
        self.not_counted = []

    def _sample(self, step):
        found = super()._sample(step)
        blocks = blocks_of(self.device)
        rounded_up = sum(block.size - block.requested for block in blocks)
        numbers = sum(block.requested for block in blocks if block.requested <= NUMBER_BYTES)
        asked_for = allocator_bytes(self.device).allocated - rounded_up - numbers
        self.not_counted.append(asked_for - found.counted_bytes)
        return found


def distance(output, target):
    return (output * target.float()).sum()


def blocks_of(device):
    with RUNTIME.lock:
        return [block for block in RUNTIME.memory.live.values() if block.queue.device == device.index]


def look_at_memory(rank, num_ranks, held):
    device = torch.device("emu", rank)
    transport = transport_of(rank, num_ranks, device)
    with DRAWING:
        torch.manual_seed(0)
        layers = [Shifted() for _ in range(LAYERS_PER_RANK * num_ranks)]
    schedule = build(held.family, ranks=num_ranks, microbatches=NUM_MICROBATCHES)
    pipeline = Pipeline(
        layers, schedule, loss=distance, transport=transport, device=device, run_ahead=held.run_ahead,
        frees_other_stages=False, offload=held.offload,
    )  # fmt: skip
    try:
        return _looked(pipeline, transport, device)
    finally:
        pipeline.close()


def _looked(pipeline, transport, device):
    optimizer = torch.optim.AdamW(pipeline.parameters(), foreach=False)
    inputs = torch.ones(NUM_MICROBATCHES * ROWS, WIDTH, device=device)
    target = torch.zeros(NUM_MICROBATCHES * ROWS, WIDTH, dtype=torch.float64, device=device)
    pipeline.step(inputs, target=target)
    optimizer.step()
    report = pipeline.memory_report(inputs, target=target, optimizer=optimizer)
    look = AllocatorLook(pipeline.stages, device, optimizer, device_queue_of(transport), pipeline._session.parameters)
    pipeline._runner.run(Mode.TRAIN, StepRequest((inputs,), {}, target), look)
    torch.accelerator.reset_peak_memory_stats(device)
    pipeline.step(inputs, target=target)
    peak_bytes = allocator_bytes(device, peak=True).allocated
    optimizer_bytes = look.memory(transport.rank).optimizer_bytes
    differences = [each - optimizer_bytes for each in look.not_counted]
    own, predicted_bytes = report.ranks[transport.rank], report.predicted_bytes[transport.rank]
    return Looked(differences, own, predicted_bytes, peak_bytes, inputs.nbytes, target.nbytes)


CELLS = [
    Held("1f1b", 3, 2),
    Held("zb-h1", 2, 1),
    *(pytest.param(held, marks=pytest.mark.slow) for held in (Held("gpipe", 2), Held("zbv", 2, 2))),
]
LEAST_SHARE = 0.98


@pytest.mark.feature("H8")
@pytest.mark.parametrize("held", CELLS, ids=str)
def test_a_report_has_every_byte_of_the_allocator_and_predicts_its_peak(emulated, held):
    """But for the batch, which is the caller's, the losses, and what the allocator rounds up.

    The prediction lacks what a layer takes and gives back within one instruction.
    """
    found = emulated.run(look_at_memory, held, num_ranks=held.num_ranks, timeout_s=60)

    for looked in found:
        batch_bytes = looked.input_bytes + looked.target_bytes
        # Autograd keeps views of the batch, and what it keeps is counted.
        partly = {0, looked.input_bytes, looked.target_bytes, batch_bytes}
        assert set(looked.differences) <= partly
        assert [looked.differences[0], looked.differences[-1]] == [batch_bytes] * 2
        begin, own = looked.own.points[0], looked.own
        assert begin.name == Moment.BEGIN
        assert begin.allocated_bytes == begin.counted_bytes + own.optimizer_bytes + batch_bytes
        predicted = looked.predicted_bytes + batch_bytes
        assert LEAST_SHARE * looked.peak_bytes <= predicted <= looked.peak_bytes
        assert len(looked.differences) > 2 * NUM_MICROBATCHES


@pytest.mark.feature("H1", "H8")
@pytest.mark.parametrize("held", [Held("gpipe", 2, 2, offload=(0, 1)), Held("1f1b", 3, 1, offload=(0,))], ids=str)
def test_of_what_leaves_for_the_host_a_report_has_what_is_on_the_device_still(emulated, held):
    """The prediction counts a copy as over when its row is; on the device it reads its activation for a while."""
    found = emulated.run(look_at_memory, held, num_ranks=held.num_ranks, timeout_s=60)

    for looked in found:
        batch_bytes = looked.input_bytes + looked.target_bytes
        assert set(looked.differences) <= {0, looked.input_bytes, looked.target_bytes, batch_bytes}
        predicted = looked.predicted_bytes + batch_bytes
        activation_bytes = max(stage.activation_bytes for stage in looked.own.stages)
        assert LEAST_SHARE * looked.peak_bytes - activation_bytes <= predicted <= looked.peak_bytes
