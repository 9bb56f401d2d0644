"""Batches in the host's memory are copied ahead of the computations that read them: the same bits, and no report."""

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
from tests.emulated.failing_steps import Failing, train_around_a_failure
from tests.emulated.kernels import slow
from tests.emulated.pipelines import DRAWING, IN_MEMORY, Cell, expect_equal_training
from tests.emulated.runtime import RUNTIME
from tests.emulated.scenarios import POLICIES

pytestmark = pytest.mark.emulated

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
    RUNTIME.host_waits.clear()
    with slow_copies(found):
        result = pipeline.step(inputs, mask=mask, table=torch.randn(WIDTH), target=target)
        of_losses = found[1].pop("current")
    host_waits = dict(RUNTIME.host_waits)
    assert of_losses == 1, "the losses come back to the device by the current stream"
    assert result.loss.item() > 0
    return found[1], found[0], host_waits


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


class RaisesInTheSecondStep(nn.Module):
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
        layer = RaisesInTheSecondStep()
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


CELLS = [
    Cell("1f1b", "plain", 2, memory="host"),
    Cell("gpipe", "variable shapes", 3, 1, memory="pinned"),
    Cell("zb-h1", "late weights", 2, 2, memory="host"),
    Cell("seq1f1b", "slices", 3, memory="pinned"),
    Cell("zbv", "dropout", 4, 2, memory="pinned"),
    Cell("dualpipe-v", "overlapped pairs", 2, memory="pinned"),
    Cell("dualpipe-v", "main gradients", 3, 2, memory="host"),
]


@pytest.mark.feature("H1")
@pytest.mark.parametrize(
    "cell", [*CELLS[:2], *(pytest.param(cell, marks=pytest.mark.slow) for cell in CELLS[2:])], ids=str
)
def test_a_training_on_batches_of_the_host_is_the_cpus_to_the_bit(emulated, cell):
    expect_equal_training(emulated, cell)


OF_EVERY_RUN = [(CELLS[1], "eager", 0), (CELLS[3], "random", 1), (CELLS[5], "random", 2)]
IN_FULL = [(cell, *policy) for cell in CELLS for policy in POLICIES[1:] if (cell, *policy) not in OF_EVERY_RUN]


@pytest.mark.parametrize(
    ("cell", "policy", "seed"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in OF_EVERY_RUN),
        *(pytest.param(*case, marks=pytest.mark.full) for case in IN_FULL),
    ],
    ids=str,
)
def test_no_policy_changes_a_bit(emulated, cell, policy, seed):
    expect_equal_training(emulated, cell, policy, seed)


@pytest.mark.feature("H1")
@pytest.mark.parametrize(("form", "memory"), [("whole", "host"), ("whole", "pinned"), ("stream", "host")])
def test_the_copy_of_a_microbatch_runs_beside_the_computation_of_the_one_before_it(emulated, form, memory):
    """On the simulated clock: only the first copy is waited for. One after the other would take copies + forwards."""
    (took_s,) = emulated.run(evaluated_in, form, memory)

    least_s = COPY_S + NUM_MICROBATCHES * FORWARD_S
    assert least_s <= took_s < least_s + 0.1 * COPY_S


def test_copies_have_a_stream_of_their_own_each_is_queued_once_and_the_host_waits_for_none(emulated):
    ((of_copies, of_computations, host_waits),) = emulated.run(queues_of_copies, policy="lazy")

    # 3 per microbatch: inputs, mask and target; and a table, once.
    assert of_copies == {"own": 3 * NUM_MICROBATCHES + 1}
    assert set(of_computations) == {"current"}
    assert "copy to the device" not in host_waits


@pytest.mark.feature("H1")
@pytest.mark.parametrize(("memory", "policy"), [("host", "lazy"), ("pinned", "eager")])
def test_the_device_holds_two_microbatches_and_never_the_batch(emulated, memory, policy):
    """The one that is computed with, and the memory for the next one; however far the host is ahead."""
    (most_bytes,) = emulated.run(device_bytes_of_steps, memory, policy=policy)

    assert 2 * SHARE_BYTES <= most_bytes < 3 * SHARE_BYTES


def test_a_failed_step_leaves_nothing_on_the_device_and_the_batch_to_the_caller(emulated):
    ((before, behind, losses),) = emulated.run(what_a_failed_step_leaves, policy="lazy")

    assert behind == before
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "run_ahead"), [("raises", None), ("late", 2)])
def test_a_batch_is_the_callers_again_where_another_rank_has_failed(emulated, kind, run_ahead):
    failing = Failing(kind, run_ahead=run_ahead, memory="pinned")

    found = emulated.run(train_around_a_failure, failing, "emu", num_ranks=3, timeout_s=60)
    expected = emulated.run(train_around_a_failure, Failing(None), "cpu", num_ranks=3, timeout_s=60)

    assert [ended.losses for ended in found] == [ended.losses for ended in expected]
    assert [ended.weights for ended in found] == [ended.weights for ended in expected]
