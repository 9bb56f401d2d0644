"""Paths of Penstock on a queued device that no training of test_pipelines.py takes: nothing is reported of them."""

import tempfile
import time
from concurrent.futures import wait
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.checkpoints import row_exchange
from penstock.checkpoints.local_tensors import LocalTensor
from penstock.checkpoints.writer import CheckpointWriter
from penstock.execute.losses.step_losses import StepLosses
from penstock.execute.observing.clock import Clock, ClockComparison
from penstock.execute.parameters.averaged import Averaged
from penstock.execute.replicas.rows import Rows
from penstock.execute.step import Step
from penstock.execute.transport.device_queue import device_queue_of
from penstock.train.measuring.measure import measure_layers
from tests.emulated.kernels import slow
from tests.emulated.pipelines import DRAWING, transport_of
from tests.emulated.planting import replaced
from tests.emulated.rank_threads import communicator
from tests.emulated.runtime import RUNTIME

pytestmark = pytest.mark.emulated

WIDTH, ROWS, NUM_MICROBATCHES = 4, 2, 4
FORWARD_S, CLOCK_S = 0.5, 1e-3
"""What the slow kernel of a measured layer takes, and what its others take together, at most."""


def _here(rank):
    return torch.device("emu", rank)


def _linear_layers():
    return [nn.Linear(WIDTH, WIDTH) for _ in range(2)]


@contextmanager
def pipeline_of(rank, num_ranks, layers=_linear_layers, family="1f1b", *, plan=None, **options):
    """A pipeline of this rank's thread, with an optimizer."""
    device = _here(rank)
    with DRAWING:
        torch.manual_seed(0)
        made = layers()
    schedule = ps.build(family, ranks=num_ranks, microbatches=NUM_MICROBATCHES)
    options = {"transport": transport_of(rank, num_ranks, device), "device": device, **options}
    options = {"loss": nn.functional.mse_loss, "frees_other_stages": False, **options}
    with ps.Pipeline(made, schedule if plan is None else plan(schedule), **options) as pipeline:
        yield pipeline, torch.optim.SGD(pipeline.parameters(), lr=0.1, foreach=False)


def _train(pipeline, optimizer, *, num_steps=2):
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        shape = ROWS * NUM_MICROBATCHES, WIDTH
        inputs, target = (torch.randn(shape, generator=generator).to(pipeline.device) for _ in range(2))
        pipeline.step(inputs, target=target)
        optimizer.step()
        optimizer.zero_grad()


class _TwoTensors(nn.Module):
    """Passes two tensors and a scalar on."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, values):
        return self.first(values), self.second(values), 0.5


class _Sum(nn.Module):
    """Takes what `_TwoTensors` passes on."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, values):
        first, second, factor = values
        return self.layer(first) + factor * second


def several_tensors(rank, num_ranks):
    with pipeline_of(rank, num_ranks, lambda: [_TwoTensors(), _Sum()]) as trained:
        _train(*trained)


def offloaded_activations(rank, num_ranks):
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    plan = lambda schedule: ps.lower(schedule, offload=range(2))  # noqa: E731  # two words
    with pipeline_of(rank, num_ranks, lambda: layers, "gpipe", plan=plan) as trained:
        _train(*trained)


def saved_checkpoints(rank, num_ranks):
    with tempfile.TemporaryDirectory() as folder, pipeline_of(rank, num_ranks) as (pipeline, optimizer):
        writer = CheckpointWriter(folder, pipeline, optimizer)
        for step in range(2):
            _train(pipeline, optimizer, num_steps=1)
            writer.save(step)
            wait([writer._save.files_future])  # so that the files are written before this host knows more of its device
        _train(pipeline, optimizer, num_steps=1)
        writer.finish()


def checked_values(rank, num_ranks):
    """Let all messages say what they are, and compare copies of a tied parameter."""
    with pipeline_of(rank, num_ranks, tied=[("0.weight", "1.weight")], debug="values") as trained:
        _train(*trained)


def compared_clocks(rank, num_ranks):
    transport, hosts = transport_of(rank, num_ranks, _here(rank)), [f"host {number}" for number in range(num_ranks)]
    ClockComparison(transport, _here(rank), Clock(time.monotonic, hosts[rank]), hosts).begin()
    transport.close()


def state_of_all_ranks(rank, num_ranks):
    with pipeline_of(rank, num_ranks) as (pipeline, _):
        state = pipeline.state_dict(on_rank=0)
    return sum(value.double().sum().item() for value in state.values())


def exchanged_rows(rank, num_ranks, num_rows=5):
    """Let each rank get the rows of one tensor, which all share out, and add them up."""
    transport = transport_of(rank, num_ranks, _here(rank))
    gathered = torch.zeros(num_rows, WIDTH, device=_here(rank))
    local_rows = Rows(gathered.shape, (), num_ranks).of_replica(rank)
    local = torch.full((len(local_rows), WIDTH), 1.0 + rank, device=_here(rank))
    gathered[local_rows.start : local_rows.stop] = local
    part = LocalTensor(local, tuple(gathered.shape), local_rows)
    row_exchange.exchange_rows(transport, [[part]] * num_ranks, [gathered], _here(rank))
    total = gathered.sum().item()
    transport.close()
    return total


def reductions(rank, num_ranks):
    """Average a gradient over replicas, and let a row wait for what another one has launched."""
    replicas = communicator("replicas")
    averaged, launched = (torch.full((WIDTH,), 1.0 + rank, device=_here(rank)) for _ in range(2))
    reduce = lambda tensor, group, async_op: replicas.all_reduce([tensor])  # noqa: E731  # as torch.distributed has it
    Averaged._run(SimpleNamespace(_limit_s=lambda: 10.0), 0, None, reduce, [averaged])
    total = averaged * 2
    step = Step((), StepLosses(0, 1))
    step.tickets[0] = replicas.all_reduce([launched])
    step.wait_for(0)
    return (launched * total).sum().item()


def an_allocation_beside_an_abort(rank, num_ranks):
    """Allocate while another thread of the rank gives up its messages, as the watchdog does for a blocked host."""
    transport = transport_of(rank, num_ranks, _here(rank))
    for follows in (True, False):
        ticket = transport.post_receive(1 - rank, torch.empty(WIDTH, device=_here(rank)))
        if follows:
            device_queue_of(transport).follow(ticket)
    with replaced("tests.emulated.nccl:Communicator.abort", _behind_an_allocation):
        transport.abort()
    transport.close()


def _behind_an_allocation(abort):
    def allocate_and_abort(communicator):
        torch.empty(WIDTH, device=torch.device("emu", communicator.device))
        abort(communicator)

    return allocate_and_abort


class _Slow(nn.Linear):
    def forward(self, values):
        product = super().forward(values)
        slow(product, FORWARD_S)
        return product


def measured_layers(rank, num_ranks):
    """Measure a forward, which takes the time of the simulated clock."""
    host, batch = RUNTIME.host(), (torch.ones(ROWS, WIDTH),)
    layers = [_Slow(WIDTH, WIDTH)]
    times = measure_layers(layers, batch, device=_here(rank), num_rounds=2, clock=lambda: host.now_s)
    assert FORWARD_S <= times.forward_s[0] < FORWARD_S + CLOCK_S


SCENARIOS = (
    several_tensors, offloaded_activations, saved_checkpoints, checked_values, compared_clocks, state_of_all_ranks,
    exchanged_rows, reductions, an_allocation_beside_an_abort, measured_layers,
)  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize(("policy", "seed"), [("lazy", 0), pytest.param("random", 1, marks=pytest.mark.slow)])
def test_nothing_is_reported_of_a_path_that_no_training_takes(emulated, policy, seed, scenario):
    emulated.run(scenario, num_ranks=1 if scenario is measured_layers else 2, policy=policy, seed=seed)
