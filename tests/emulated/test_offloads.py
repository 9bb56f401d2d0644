"""Activations go to the host and back beside the computations: the same bits, all is ordered, and no host waits."""

import gc
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import PipelineError
from penstock.execute.accelerator import allocator_bytes
from penstock.execute.observing.clock import Clock
from penstock.ir.operations import IS_COPY
from tests.emulated.copies import TO_DEVICE, TO_HOST
from tests.emulated.kernels import slow
from tests.emulated.pipelines import DRAWING, Cell, expect_equal_training
from tests.emulated.replicas import train as train_replicas
from tests.emulated.runtime import RUNTIME
from tests.emulated.timed_pipelines import host_now_s

pytestmark = pytest.mark.emulated

WIDTH, ROWS, NUM_MICROBATCHES = 256, 2, 6
ACTIVATION_BYTES = 4 * ROWS * WIDTH
COMPUTE_S, COPY_S = 1.0, 0.25
"""What a forward, and a backward, takes; and what a copy takes in either direction."""
NUM_STORAGES = 2
"""The layer keeps one of a microbatch, and the loss another."""


class Slow(nn.Module):
    """Keeps one tensor of its own for its backward, which is as slow as its forward."""

    def __init__(self):
        super().__init__()
        self.layer, self.num_left = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, values):
        self.num_left -= 1
        if self.num_left == 0:
            raise ValueError("a planted error")
        kept = self.layer(values).tanh()
        slow(kept, COMPUTE_S)
        made = kept * 2
        made.register_hook(lambda gradient: slow(gradient, COMPUTE_S))
        return made


@contextmanager
def slow_copies(num_by_stream):
    """Let each copy between device and host take its time on the simulated clock; count them by direction, stream."""
    launch, main = RUNTIME.launch, RUNTIME.current_queue()

    def launch_slowly(queue, name, *rest, **options):
        if name in (TO_HOST, TO_DEVICE):
            num_by_stream[name, "current" if queue is main else "own"] += 1
            options["cost_s"] = COPY_S
        return launch(queue, name, *rest, **options)

    RUNTIME.launch = launch_slowly
    try:
        yield
    finally:
        del RUNTIME.launch


def pipeline_of(rank, **options):
    """A pipeline of one rank whose first stage, which is given the batch, moves what its layer keeps."""
    with DRAWING:
        torch.manual_seed(0)
        layer = Slow()
    schedule = ps.build("gpipe", ranks=1, microbatches=NUM_MICROBATCHES)
    loss = nn.functional.mse_loss
    return layer, ps.Pipeline([layer], schedule, loss=loss, device=torch.device("emu", rank), offload=[0], **options)


def batch_on(device):
    return [torch.randn(ROWS * NUM_MICROBATCHES, WIDTH, device="cpu").to(device) for _ in range(2)]


def timed_step(rank, num_ranks, one_stream):
    """Return the simulated seconds of a step whose copies are slow, how often the hosts waited, and the copies."""
    _, pipeline = pipeline_of(rank, one_stream=one_stream)
    inputs, target = batch_on(pipeline.device)
    pipeline.step(inputs, target=target)
    torch.accelerator.synchronize()
    begin_s, copies = RUNTIME.current_queue().now_s, Counter()
    RUNTIME.host_waits.clear()
    with slow_copies(copies):
        pipeline.step(inputs, target=target)
        host_waits = dict(RUNTIME.host_waits)
        torch.accelerator.synchronize()
    return RUNTIME.current_queue().now_s - begin_s, host_waits, copies


def recorded_step(rank, num_ranks):
    _, pipeline = pipeline_of(rank, clock=Clock(host_now_s, host="simulated"))
    inputs, target = batch_on(pipeline.device)
    pipeline.step(inputs, target=target)
    with slow_copies(Counter()):
        pipeline.step(inputs, target=target, record=True)
    return pipeline.timeline


def peaks_of_steps(rank, num_ranks, offload):
    """Return the most bytes of activations that the allocator has given out in a step, and those of the pools."""
    with DRAWING:
        layers = [Slow()]
    device = torch.device("emu", rank)
    schedule = ps.build("gpipe", ranks=1, microbatches=NUM_MICROBATCHES)
    options = {"loss": nn.functional.mse_loss, "device": device, "offload": offload}
    pipeline = ps.Pipeline(layers, schedule, **options)
    inputs, target = batch_on(device)
    for _ in range(2):
        torch.accelerator.reset_peak_memory_stats(device)
        before = allocator_bytes(device)
        pipeline.step(inputs, target=target)
    torch.accelerator.synchronize()
    return allocator_bytes(device, peak=True).allocated - before.allocated, allocator_bytes(device).reserved


def around_a_failed_step(rank, num_ranks, num_left):
    """Return the losses of two steps, and the bytes of the device before and behind one between them that fails."""
    layer, pipeline = pipeline_of(rank)
    losses, figures = [], []
    for number in range(3):
        torch.manual_seed(1)
        inputs, target = batch_on(pipeline.device)
        for parameter in pipeline.parameters():
            parameter.grad = None
        gc.collect()
        figures.append(allocator_bytes(pipeline.device).allocated)
        if number == 1:
            layer.num_left = num_left
            with pytest.raises(PipelineError, match="a planted error"):
                pipeline.step(inputs, target=target)
            for parameter in pipeline.parameters():
                parameter.grad = None
        else:
            losses.append(pipeline.step(inputs, target=target).loss.item())
    return losses, figures


CELLS = [
    Cell("gpipe", "plain", 2, 2),
    Cell("1f1b", "recompute", 3, 1),
    Cell("zb-h1", "late weights", 2, 2),
    Cell("interleaved-1f1b", "dropout", 2, None),
    Cell("seq1f1b", "slices", 3, 2),
    Cell("dualpipe-v", "overlapped pairs", 2),
    Cell("zbv", "ties", 3, 2, messages="coalesced"),
    Cell("1f1b", "variable shapes", 4, 2),
]


@pytest.mark.feature("H1")
@pytest.mark.parametrize(
    "cell", [*CELLS[:2], *(pytest.param(cell, marks=pytest.mark.slow) for cell in CELLS[2:])], ids=str
)
@pytest.mark.parametrize(("policy", "seed"), [("lazy", 0), ("random", 3)])
def test_a_training_that_offloads_is_the_cpus_to_the_bit(emulated, cell, policy, seed):
    expect_equal_training(emulated, Cell(**vars(cell) | {"offloads": True}), policy, seed)


def replicas_on(rank, num_ranks, kind, options):
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, rank)
    return train_replicas(rank, num_ranks, 2, device, **options)


@pytest.mark.feature("H1")
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "gpipe", "shard": "full", "residency": 1},
        pytest.param({"schedule": "gpipe", "fails": True}, marks=pytest.mark.slow),
        pytest.param({"schedule": "zbv", "shard": "optimizer", "one_stream": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_replicas_and_shards_that_offload_train_as_on_the_cpu_without_it(emulated, options):
    moved = options | {"offload": (0, 1)}
    found = emulated.run(replicas_on, "emu", moved, num_ranks=4, policy="random", seed=2, timeout_s=110)
    expected = emulated.run(replicas_on, "cpu", options, num_ranks=4, timeout_s=110)

    for (losses, weights, _), (cpu_losses, cpu_weights, _) in zip(found, expected, strict=True):
        assert losses == cpu_losses
        assert all(torch.equal(weights[name], value) for name, value in cpu_weights.items())


@pytest.mark.feature("H1")
def test_copies_run_beside_the_computations_on_a_stream_of_their_own_and_no_host_waits(emulated):
    """One after the other, the step would take half as long again."""
    ((took_s, host_waits, copies),) = emulated.run(timed_step, False)

    of_losses_s = COPY_S * sum(number for (_, stream), number in copies.items() if stream == "current")
    all_s = 2 * NUM_MICROBATCHES * COMPUTE_S + of_losses_s
    assert all_s <= took_s < all_s + 0.1 * COPY_S, (took_s, copies)
    assert copies[TO_HOST, "own"] == copies[TO_DEVICE, "own"] == NUM_STORAGES * NUM_MICROBATCHES
    assert TO_DEVICE not in host_waits
    assert host_waits.get(TO_HOST, 0) == copies[TO_HOST, "current"]  # the losses


@pytest.mark.feature("H1")
def test_on_one_stream_copies_and_computations_take_turns(emulated):
    ((took_s, _, copies),) = emulated.run(timed_step, True)

    assert took_s >= 2 * NUM_MICROBATCHES * (COMPUTE_S + NUM_STORAGES * COPY_S)
    assert {stream for _, stream in copies} == {"current"}


@pytest.mark.feature("H7")
def test_a_recorded_copy_has_the_time_of_its_device_and_that_of_its_host(emulated):
    (timeline,) = emulated.run(recorded_step)

    program, near = timeline.program, 0.1 * COPY_S
    is_copy, is_compute = IS_COPY[program.op], program.is_compute
    copies_s = (timeline.end_s - timeline.start_s)[is_copy]
    assert copies_s == pytest.approx([NUM_STORAGES * COPY_S] * len(copies_s), abs=near)
    assert (timeline.end_s - timeline.start_s)[is_compute] == pytest.approx([COMPUTE_S] * sum(is_compute), abs=near)
    # The host launches all of it at once, as far as it may be ahead, and waits for no copy.
    assert (timeline.host.end_s - timeline.host.start_s).max() < near
    assert (timeline.host.wait_end_s - timeline.host.wait_start_s).max() < near
    assert timeline.host.start_s[is_compute][-1] < timeline.start_s[is_compute][-1] - COMPUTE_S


def test_the_device_holds_one_activation_more_than_it_computes_with_and_not_all(emulated):
    ((peak_bytes, reserved),) = emulated.run(peaks_of_steps, [0])
    ((whole_peak_bytes, whole_reserved),) = emulated.run(peaks_of_steps, ())

    # Of six activations there are three at most: one leaves while the next is made, and one more comes back.
    assert whole_peak_bytes - peak_bytes >= 3 * ACTIVATION_BYTES
    assert whole_reserved - reserved >= 3 * ACTIVATION_BYTES


@pytest.mark.parametrize("num_left", [2, NUM_MICROBATCHES])
@pytest.mark.parametrize("policy", ["lazy", "eager"])
def test_a_failed_step_leaves_nothing_and_no_copy_meets_later_memory(emulated, policy, num_left):
    """The step fails in its second forward, or in its last, when a reload is under way."""
    ((losses, (_, before, behind)),) = emulated.run(around_a_failed_step, num_left, policy=policy)

    assert losses[0] == losses[1]
    assert behind == before
