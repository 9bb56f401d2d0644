"""Scenarios for batches in the host's memory on a queued device: what is copied when, where, and into which memory."""

import gc
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from penstock import BatchSpec, Observer, Part, Replicate, Stream
from penstock.errors import PipelineError
from penstock.execute.accelerator import allocator_bytes
from penstock.pipeline import Pipeline
from tests.emulated.kernels import slow
from tests.emulated.pipelines import DRAWING, IN_MEMORY
from tests.emulated.runtime import RUNTIME

WIDTH, ROWS, NUM_MICROBATCHES = 256, 2, 6
SHARE_BYTES = 4 * ROWS * WIDTH
FORWARD_S, COPY_S = 1.0, 0.5
COPY = "copy to the device"


def here(rank):
    return torch.device("emu", rank)


def batch_in(memory, device):
    return IN_MEMORY[memory](torch.randn(ROWS * NUM_MICROBATCHES, WIDTH), device)


# ---- when


class Slow(nn.Module):
    def forward(self, values):
        made = values + 1
        slow(made, FORWARD_S)
        return made


@contextmanager
def slow_copies(queues_by_kind):
    """Let each copy to the device take its time on the simulated clock; count copies and all else by their stream."""
    launch, main = RUNTIME.launch, RUNTIME.current_queue()

    def launch_slowly(queue, name, *rest, **options):
        queues_by_kind[name == COPY]["current" if queue is main else "own"] += 1
        return launch(queue, name, *rest, **options | ({"cost_s": COPY_S} if name == COPY else {}))

    RUNTIME.launch = launch_slowly
    try:
        yield
    finally:
        del RUNTIME.launch


def evaluated_in(rank, num_ranks, form, memory):
    """Return the seconds of the simulated clock that an evaluation takes whose copies are slow."""
    device = here(rank)
    pipeline = Pipeline([Slow()], "gpipe", NUM_MICROBATCHES, nn.functional.mse_loss, device=device)
    batch = batch_in(memory, device)
    if form == "stream":
        batch = Stream(Part(part) for part in batch.chunk(NUM_MICROBATCHES))
    torch.accelerator.synchronize()
    begin_s = RUNTIME.current_queue().now_s
    with slow_copies((Counter(), Counter())):
        pipeline.evaluate(batch)
        torch.accelerator.synchronize()
    return RUNTIME.current_queue().now_s - begin_s


# ---- on which stream


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, values, *, mask, table):
        return (values + table) * mask * self.weight


def queues_of_copies(rank, num_ranks):
    """Count the copies and the computations of a step by their stream."""
    device = here(rank)
    pipeline = Pipeline(
        [Masked()], "gpipe", NUM_MICROBATCHES, nn.functional.mse_loss, device=device,
        specs=BatchSpec(kwargs={"table": Replicate()}),
    )  # fmt: skip
    inputs, mask, target = (batch_in("host", device) for _ in range(3))
    found = Counter(), Counter()
    with slow_copies(found):
        result = pipeline.step(inputs, mask=mask, table=torch.randn(WIDTH), target=target)
        of_losses = found[1].pop("current")
    assert of_losses == 1, "the losses come back to the device by the current stream"
    assert result.loss.item() > 0
    return found[1], found[0]


def waits_of_the_host(rank, num_ranks, memory):
    device = here(rank)
    pipeline = Pipeline([nn.Linear(WIDTH, 1)], "gpipe", NUM_MICROBATCHES, nn.functional.mse_loss, device=device)
    inputs, target = batch_in(memory, device), IN_MEMORY[memory](torch.zeros(ROWS * NUM_MICROBATCHES, 1), device)
    RUNTIME.host_waits.clear()
    for _ in range(2):
        pipeline.step(inputs, target=target)


# ---- into which memory


class Most(Observer):
    """Notes the most bytes that are allocated when a computation begins or ends."""

    def __init__(self, device):
        self.device, self.begin_bytes, self.most = device, 0, 0

    def begin(self, step):
        self.begin_bytes = allocator_bytes(self.device).allocated

    def around(self, program, bound):
        return self._looking

    @contextmanager
    def _looking(self, step):
        self._look()
        yield
        self._look()

    def _look(self):
        self.most = max(self.most, allocator_bytes(self.device).allocated - self.begin_bytes)


class Count(nn.Module):
    """Makes little of its input, and keeps nothing of it."""

    def forward(self, values):
        return values.detach()[:, :1] * 2


def device_bytes_of_steps(rank, num_ranks, memory):
    """Return the most bytes that evaluations hold on the device, that of allocator and pools together."""
    device = here(rank)
    look = Most(device)
    pipeline = Pipeline([Count()], "gpipe", NUM_MICROBATCHES, device=device, observers=[look])
    batch = batch_in(memory, device)
    before = allocator_bytes(device).reserved
    for _ in range(2):
        pipeline.evaluate(batch)
    torch.accelerator.synchronize()
    reserved = allocator_bytes(device).reserved - before
    assert reserved - look.most < SHARE_BYTES, "the pools hold about as much"
    return look.most


# ---- failures


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.num_left = nn.Linear(WIDTH, WIDTH), 2 * NUM_MICROBATCHES - 2

    def forward(self, values):
        self.num_left -= 1
        if not self.num_left:
            raise ValueError("a planted error")
        return self.layer(values)


def what_a_failed_step_leaves(rank, num_ranks):
    """Return the bytes of the device before and behind a step that fails, and the loss of a batch around it."""
    device = here(rank)
    with DRAWING:
        torch.manual_seed(0)
        layer = Failing()
    pipeline = Pipeline([layer], "gpipe", NUM_MICROBATCHES, nn.functional.mse_loss, device=device)
    losses, figures = [], []
    for number in range(3):
        torch.manual_seed(1)
        inputs, target = (batch_in("pinned", device) for _ in range(2))
        for parameter in pipeline.parameters():
            parameter.grad = None
        gc.collect()  # frames of the error
        figures.append(allocator_bytes(device).allocated)
        if number == 1:
            with pytest.raises(PipelineError, match="a planted error"):
                pipeline.step(inputs, target=target)
            inputs.fill_(float("nan"))
            target.fill_(float("nan"))
            for parameter in pipeline.parameters():
                parameter.grad = None
        else:
            losses.append(pipeline.step(inputs, target=target).loss.item())
    return figures[1], figures[2], losses
