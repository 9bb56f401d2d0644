"""Waits beside the path of a step, and faults in them: checks of values, clocks, states, reductions, measured layers.

Each function under `plant` takes what the name stands for, and returns what it stands for with the fault.
"""

import time
from types import SimpleNamespace

import torch

from penstock.execute.losses.step_losses import StepLosses
from penstock.execute.observing.clock import Clock, ClockComparison
from penstock.execute.parameters.averaged import Averaged
from penstock.execute.step import Step
from penstock.execute.transport.device_queue import device_queue_of
from penstock.train.measuring.measure import measure_layers
from tests.emulated.checker import FREED, PINNED, UNORDERED
from tests.emulated.pipelines import transport_of
from tests.emulated.planted_scenarios import CLOCK_S, FORWARD_S, ROWS, WIDTH, Slow, pipeline_of, train
from tests.emulated.planting import RECORDED, does_nothing, replaced, table
from tests.emulated.rank_threads import communicator
from tests.emulated.replicas import train as train_replicas
from tests.emulated.runtime import RUNTIME

FAULTS, plant = table()
OBSERVING = "penstock.execute.observing."


# ---- scenarios


def checked_values(rank, num_ranks):
    """All messages say what they are, and copies of a tied parameter are compared."""
    with pipeline_of(rank, num_ranks, tied=[("0.weight", "1.weight")], debug="values") as (pipeline, optimizer):
        train(pipeline, optimizer)


def compared_clocks(rank, num_ranks):
    """Two ranks of different hosts compare their clocks."""
    device = torch.device("emu", rank)
    transport = transport_of(rank, num_ranks, device)
    hosts = [f"host {each}" for each in range(num_ranks)]
    ClockComparison(transport, device, Clock(time.monotonic, hosts[rank]), hosts).begin()
    transport.close()


def allocating_beside_an_abort(rank, num_ranks):
    """A rank allocates while another thread of it gives up its messages, as the watchdog does for a blocked host."""
    device = torch.device("emu", rank)
    transport = transport_of(rank, num_ranks, device)
    for follows in (True, False):
        ticket = transport.post_receive(1 - rank, torch.empty(WIDTH, device=device))
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


def whole_state(rank, num_ranks):
    """One rank gets the state of all."""
    # So long does the fault let the others wait.
    with pipeline_of(rank, num_ranks, deadline_s=3.0) as (pipeline, _):
        state = pipeline.state_dict(on_rank=0)
    return sum(value.double().sum().item() for value in state.values())


def reductions(rank, num_ranks):
    """A gradient is averaged over replicas, and a row waits for what another one has launched."""
    replicas, device = communicator("replicas"), torch.device("emu", rank)
    averaged, launched = (torch.full((WIDTH,), 1.0 + rank, device=device) for _ in range(2))
    parameters = SimpleNamespace(_limit_s=lambda: 10.0)
    reduce = lambda tensor, group, async_op: replicas.all_reduce([tensor])  # noqa: E731  # as torch.distributed has it
    Averaged._run(parameters, 0, None, reduce, [averaged])
    total = averaged * 2
    step = Step((), StepLosses(0, 1))
    step.tickets[0] = replicas.all_reduce([launched])
    step.wait_for(0)
    return (launched * total).sum().item()


def measured_layers(rank, num_ranks):
    """The measured time of a forward is that of the simulated clock."""
    layer, host = Slow(rank), RUNTIME.host()
    batch = (torch.ones(ROWS, WIDTH),)
    times = measure_layers([layer], batch, device=torch.device("emu", rank), num_rounds=2, clock=lambda: host.now_s)
    if not FORWARD_S[rank] <= times.forward_s[0] < FORWARD_S[rank] + CLOCK_S:
        text = f"the forward took {times.forward_s[0]:.3f} s, not {FORWARD_S[rank]} s, launched at {layer.stack}"
        RUNTIME.checker.report(RECORDED, ["forward"], text)


def replicas(rank, num_ranks):
    """Each rank is a replica, with running statistics."""
    return train_replicas(rank, num_ranks, num_ranks, torch.device("emu", rank), norm=True)[0]


# ---- faults


class WithoutWaits:
    """A transport whose receives of one type nobody waits for."""

    def __init__(self, transport, dtype):
        self._transport, self._dtype, self._forgotten = transport, dtype, set()

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def post_receive(self, peer, tensor, *tag):
        ticket = self._transport.post_receive(peer, tensor, *tag)
        if tensor.dtype is self._dtype:
            self._forgotten.add(ticket.serial)
        return ticket

    def wait(self, ticket, *limit_s):
        if ticket.is_send or ticket.serial not in self._forgotten:
            self._transport.wait(ticket, *limit_s)


@plant(
    "checked values are used before they are there",
    "checked_values",
    f"{OBSERVING}checked_messages:CheckedMessages._take_next",
    UNORDERED,
    "recv from",
    "",
)
def _(original):
    def take_next(checked, peer):
        transport = checked._transport
        checked._transport = WithoutWaits(transport, torch.float32)
        try:
            original(checked, peer)
        finally:
            checked._transport = transport

    return take_next


plant(
    "copies of a parameter are compared before they are there",
    "checked_values",
    f"{OBSERVING}copies:_require_equal",
    UNORDERED,
    "recv from",
    "",
    make=lambda original: lambda transport, *rest: original(WithoutWaits(transport, torch.float32), *rest),
)

plant(
    "the time of another host is read before it is there",
    "compared_clocks",
    f"{OBSERVING}clock:ask",
    UNORDERED,
    "recv from",
    "copy to the host",
    make=lambda original: lambda transport, *rest: original(WithoutWaits(transport, torch.float64), *rest),
)

plant(
    "what messages hold dies before an abort has ended them",
    "allocating_beside_an_abort",
    "penstock.execute.transport.torch_dist:TorchTransport._forget",
    FREED,
    "recv from",
    "free",
    make=lambda original: lambda transport: (original(transport)[0], []),
)


plant(
    "the state of another rank is read before it is there",
    "whole_state",
    "penstock.execute.stages.model_state:_receive",
    UNORDERED,
    "recv from",
    "",
    make=lambda original: lambda transport, *rest: original(WithoutWaits(transport, torch.uint8), *rest),
)

plant(
    "an average over replicas is used before it is there",
    "reductions",
    "penstock.execute.parameters.averaged:QueuedMessage",
    UNORDERED,
    "all_reduce",
    "mul",
    make=lambda original: lambda work, tensor: SimpleNamespace(wait=lambda deadline_s: None),
)

plant(
    "nobody waits for what a row has launched",
    "reductions",
    "penstock.execute.step:Step.wait_for",
    UNORDERED,
    "all_reduce",
    "mul",
    make=lambda original: lambda step, row: step.tickets.pop(row),
)

plant(
    "the time of a layer is read before the device has run it",
    "measured_layers",
    "penstock.train.measuring.measure:synchronize",
    RECORDED,
    "forward",
    make=does_nothing,
)

plant(
    "to synchronize with a device does nothing",
    "saved_checkpoints",
    "penstock.execute.accelerator:torch.accelerator.synchronize",
    PINNED,
    "copy to the host",
    "the host",
    make=does_nothing,
)


@plant(
    "sums over replicas are used before they are there",
    "replicas",
    "penstock.execute.replicas.exchanges:_Exchange.complete",
    UNORDERED,
    "all_reduce",
    "",
)
def _(original):
    return lambda exchange: exchange._use_results()


@plant(
    "buffers of the first replica are used before they are there",
    "replicas",
    "penstock.execute.replicas.first_replica:Share.wait",
    UNORDERED,
    "recv from",
    "",
)
def _(original):
    def wait(share):
        share._tickets = []
        original(share)

    return wait
