"""Scenarios for planted faults: Penstock's own paths on a queued device.

Each is silent as it is. What the checker cannot know is reported by the scenario itself, as a report of the checker: a
host too far ahead of its device, and recorded times that differ from the simulated clock.
"""

import gc
import tempfile
from concurrent.futures import wait
from contextlib import contextmanager, suppress

import torch
from torch import nn

import penstock as ps
from penstock.checkpoints.writer import CheckpointWriter
from penstock.errors import PipelineError
from penstock.execute.observing.observer import Observer
from penstock.ir.operations import IS_COMPUTE
from tests.emulated.clocks import knows
from tests.emulated.kernels import slow
from tests.emulated.pinned import PAGE
from tests.emulated.pipelines import DEADLINE_S, DRAWING, OnTwoStreams, transport_of
from tests.emulated.planting import AHEAD, RECORDED
from tests.emulated.runtime import RUNTIME
from tests.emulated.stacks import capture

WIDTH, ROWS, NUM_MICROBATCHES = 4, 2, 4
ROWS_OF_PAGES = PAGE // 4 // WIDTH
"""Of a microbatch that has pages of memory to itself."""
LIMIT = 2
FORWARD_S = (0.25, 0.75)
"""By rank."""
SHORT_S = 1.0
"""The deadline of a step that is to fail."""
CLOCK_S = 1e-3
"""What all other kernels of a computation take together, at most."""


# ---- a pipeline


def linear_layers():
    return [nn.Linear(WIDTH, WIDTH) for _ in range(2)]


@contextmanager
def pipeline_of(rank, num_ranks, layers=linear_layers, family="1f1b", *, plan=None, deadline_s=DEADLINE_S, **options):
    """A pipeline of this rank's thread, with an optimizer."""
    device = torch.device("emu", rank)
    transport = transport_of(rank, num_ranks, device, deadline_s=deadline_s)
    with DRAWING:
        torch.manual_seed(0)
        made = layers()
    schedule = ps.build(family, ranks=num_ranks, microbatches=NUM_MICROBATCHES)
    options = {"transport": transport, "device": device, "frees_other_stages": False, **options}
    loss = nn.functional.mse_loss
    pipeline = ps.Pipeline(made, schedule if plan is None else plan(schedule), loss=loss, **options)
    try:
        yield pipeline, torch.optim.SGD(pipeline.parameters(), lr=0.1, foreach=False)
    finally:
        pipeline.close()


def train(pipeline, optimizer, *, num_steps=2, **options):
    device, generator = pipeline.device, torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        shape = ROWS * NUM_MICROBATCHES, WIDTH
        inputs, target = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
        result = pipeline.step(inputs, target=target, **options)
        optimizer.step()
        optimizer.zero_grad()
    return result


def following(rank, num_ranks):
    """The device waits for receives by itself."""
    with pipeline_of(rank, num_ranks, run_ahead=LIMIT) as (pipeline, optimizer):
        train(pipeline, optimizer)


def host_waits_for_receives(rank, num_ranks):
    with pipeline_of(rank, num_ranks, run_ahead=None) as (pipeline, optimizer):
        train(pipeline, optimizer)


class TwoTensors(nn.Module):
    """Passes two tensors on, with the tensors of a message of its own for scalars."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, values):
        first, second, factor = values if isinstance(values, tuple) else (values, values, 0.5)
        return self.first(first), self.second(second) * factor, factor


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, values):
        first, second, factor = values
        return self.layer(first) + factor * second


def several_tensors(rank, num_ranks):
    """Messages of two tensors and a scalar, that the device waits for."""
    with pipeline_of(rank, num_ranks, lambda: [TwoTensors(), Last()], run_ahead=LIMIT) as (pipeline, optimizer):
        train(pipeline, optimizer)


def variable_shapes(rank, num_ranks):
    """Every message has a header, which the host reads."""
    with pipeline_of(rank, num_ranks, variable_shapes=True) as (pipeline, optimizer):
        train(pipeline, optimizer)


def tied_layers(rank, num_ranks):
    tied = [("0.weight", "1.weight")]
    with pipeline_of(rank, num_ranks, tied=tied) as (pipeline, optimizer):
        train(pipeline, optimizer)


def forwards_first(rank, num_ranks):
    """All forwards before all backwards: the first rank sends ahead of what comes back."""
    with pipeline_of(rank, num_ranks, family="gpipe", run_ahead=LIMIT) as (pipeline, optimizer):
        train(pipeline, optimizer)


def overlapped_pairs(rank, num_ranks):
    overlap = OnTwoStreams(torch.device("emu", rank))
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    # A host that may not run ahead waits for computations, and so hides a stream that does not wait.
    options = {"overlap": overlap, "run_ahead": None}
    with pipeline_of(rank, num_ranks, lambda: layers, "dualpipe-v", **options) as (pipeline, optimizer):
        train(pipeline, optimizer)
    assert overlap.num_pairs


def offloaded(rank, num_ranks):
    """Activations go to the host and come back."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    plan = lambda schedule: ps.lower(schedule, offload=range(2))  # noqa: E731  # two words
    with pipeline_of(rank, num_ranks, lambda: layers, "gpipe", plan=plan) as (pipeline, optimizer):
        train(pipeline, optimizer)


def saved_checkpoints(rank, num_ranks):
    """Checkpoints are written, and steps follow."""
    with tempfile.TemporaryDirectory() as folder, pipeline_of(rank, num_ranks) as (pipeline, optimizer):
        writer = CheckpointWriter(folder, pipeline, optimizer)
        for step in range(2):
            train(pipeline, optimizer, num_steps=1)
            writer.save(step)
            wait([writer._save.files_future])  # so that the files are written before this host knows more of its device
        train(pipeline, optimizer, num_steps=1)
        writer.finish()


# ---- batches in the host's memory


def batches_of_the_host(rank, num_ranks):
    """Inputs are pinned and the target is not; both are overwritten when the step is over."""
    with pipeline_of(rank, num_ranks, lambda: linear_layers()[:1], "gpipe") as (pipeline, optimizer):
        shape = ROWS_OF_PAGES * NUM_MICROBATCHES, WIDTH
        inputs, target = torch.ones(shape).pin_memory(), torch.zeros(shape)
        for step in range(2):
            pipeline.step(inputs, target=target)
            inputs.fill_(step)
            pipeline.evaluate(inputs)
            inputs.fill_(step + 2)
            optimizer.step()
            optimizer.zero_grad()


def refilled_buffers(rank, num_ranks):
    """A stream gives the same pinned tensors again and again, filled anew."""
    inputs, target = torch.zeros(ROWS, WIDTH, pin_memory=True), torch.zeros(ROWS, WIDTH, pin_memory=True)

    def filled():
        for number in range(2 * NUM_MICROBATCHES):
            inputs.fill_(number)
            yield inputs, target

    with pipeline_of(rank, num_ranks, lambda: linear_layers()[:1], "gpipe") as (pipeline, _):
        stream = ps.Stream(filled())
        for _ in range(2):
            pipeline.step(stream)


# ---- how far the host is ahead


class Lead(Observer):
    """Reports a computation that begins while more than `LIMIT` before it may not have ended, as the host knows."""

    def __init__(self):
        self._launched = []
        self.most = 0

    def begin(self, step):
        self._launched.clear()

    def around(self, program, bound):
        if bound.awaits is not None or not IS_COMPUTE[program.op[bound.row]]:
            return None
        return lambda step: self._looking(str(program.instruction(bound.row)))

    @contextmanager
    def _looking(self, name):
        queue, clock = RUNTIME.current_queue(), RUNTIME.host().clock
        unknown = [before for before in self._launched if not knows(clock, queue.index, before[1])]
        self.most = max(self.most, len(unknown))
        if len(unknown) >= LIMIT:
            (first, _, stack), here = unknown[0], capture()
            text = (
                f"{name} begins at {here} with {len(unknown)} computations ahead, the first of them {first} at {stack}"
            )
            RUNTIME.checker.report(AHEAD, [first, name], text)
        yield
        self._launched.append((name, queue.clock[queue.index], capture()))


def throttled(rank, num_ranks):
    """Not more than `LIMIT` computations are queued and not ended."""
    lead = Lead()
    with pipeline_of(rank, num_ranks, lambda: linear_layers()[:1], "gpipe", run_ahead=LIMIT, observers=[lead]) as made:
        train(*made)


# ---- recorded times


class Slow(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.layer, self.seconds, self.stack = nn.Linear(WIDTH, WIDTH), FORWARD_S[rank], None

    def forward(self, values):
        made = self.layer(values)
        slow(made, self.seconds)
        self.stack = capture()
        return made


def recorded(rank, num_ranks):
    """The recorded times of forwards are those of the simulated clock."""
    layers = [Slow(rank) for rank in range(num_ranks)]
    with pipeline_of(rank, num_ranks, lambda: layers) as (pipeline, optimizer):
        train(pipeline, optimizer)
        train(pipeline, optimizer, num_steps=1, record=True)
        timeline = pipeline.timeline
        if timeline is None:
            RUNTIME.checker.report(
                RECORDED, ["step"], f"nothing was recorded of rank {rank}, with {layers[rank].stack}"
            )
            return
        program = timeline.program
        for row in range(*program.offsets[rank : rank + 2]):
            instruction = str(program.instruction(row))
            found_s = timeline.end_s[row] - timeline.start_s[row]
            if program.op[row] == 0 and not FORWARD_S[rank] <= found_s < FORWARD_S[rank] + CLOCK_S:
                text = f"{instruction} took {found_s:.3f} s, not {FORWARD_S[rank]} s, launched at {layers[rank].stack}"
                RUNTIME.checker.report(RECORDED, [instruction], text)


# ---- a step that fails


class FailsOnce(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.num_left = nn.Linear(WIDTH, WIDTH), 2 * NUM_MICROBATCHES

    def forward(self, values):
        self.num_left -= 1
        if not self.num_left:
            raise ValueError("a planted error")
        return self.layer(values)


def failing(rank, num_ranks):
    """The last forward of the second step fails on the last rank, and the next step is as any other."""
    with pipeline_of(rank, num_ranks, lambda: [nn.Linear(WIDTH, WIDTH), FailsOnce()], "gpipe") as (pipeline, optimizer):
        train(pipeline, optimizer, num_steps=1)
        pipeline.control.transport.deadline_s = SHORT_S
        try:
            train(pipeline, optimizer, num_steps=1)
        except PipelineError:
            optimizer.zero_grad()
        pipeline.control.transport.deadline_s = DEADLINE_S
        train(pipeline, optimizer, num_steps=1)


class FailsInBackward(torch.autograd.Function):
    """Fails in the first backward of the second step."""

    num_left = NUM_MICROBATCHES + 1

    @staticmethod
    def forward(context, values):
        return values.view_as(values)

    @staticmethod
    def backward(context, gradient):
        FailsInBackward.num_left -= 1
        if not FailsInBackward.num_left:
            raise ValueError("a planted error")
        return gradient


class Backwards(nn.Module):
    def __init__(self):
        super().__init__()
        FailsInBackward.num_left = NUM_MICROBATCHES + 1
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, values):
        return FailsInBackward.apply(self.layer(values))


def failing_copies(rank, num_ranks):
    """A backward fails while a microbatch is on its way to the device, and other tensors get the memory of its copy."""
    with pipeline_of(rank, num_ranks, lambda: [Backwards(), nn.Linear(WIDTH, WIDTH)]) as (pipeline, _):
        inputs, target = torch.ones(2, ROWS * NUM_MICROBATCHES, WIDTH)
        pipeline.step(inputs, target=target)
        with suppress(PipelineError):
            pipeline.step(inputs, target=target)
        gc.collect()  # frames of the error
        found = [torch.zeros(ROWS, WIDTH, device=pipeline.device) for _ in range(4 * NUM_MICROBATCHES)]
        assert all(each.sum().item() == 0 for each in found)
