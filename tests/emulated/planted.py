"""A sample of faults of ordering and lifetime in Penstock: one for each kind of report, and one for each scenario.

A fault replaces one name: `make` takes what the name stands for, and returns what it stands for with the fault.
"""

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import torch

from penstock.execute.stages.offloading import _bytes_in
from penstock.execute.transport.backend_links import QueuedMessage
from penstock.execute.transport.device_queue import _Followed
from tests.emulated import planted_scenarios as scenarios
from tests.emulated.checker import FREED, HANG, PINNED, REUSED, UNORDERED
from tests.emulated.pipelines import Cell, train
from tests.emulated.planting import replaced

HOST_WAITS, WRONG_TIME = "more waits of the host", "AssertionError"
"""What tells of a fault without a report of the checker."""
TRANSPORT = "penstock.execute.transport."
OBSERVING = "penstock.execute.observing."


@dataclass(frozen=True)
class Fault:
    """One fault."""

    scenario: object
    """Called with the rank and the number of ranks."""
    place: str
    """The module, and the name within it that is replaced."""
    make: object
    kind: str
    operations: tuple = ()
    """The beginnings of the names of the report's operations."""


def run_planted(rank, num_ranks, name, is_there=True):
    """Run a fault's scenario on one rank, with the fault where it is there."""
    fault = FAULTS[name]
    with replaced(fault.place, fault.make if is_there else lambda original: original):
        return fault.scenario(rank, num_ranks)


def training(family="1f1b", **options):
    return partial(train, cell=Cell(family, "plain", 2, **options), kind="emu")


FOLLOWING, WAITING = training(run_ahead=2), training(run_ahead=None)


class WithoutWaits:
    """A transport whose receives of one type nobody waits for."""

    def __init__(self, transport, dtype):
        self._transport, self._dtype, self._serials = transport, dtype, set()

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def post_receive(self, peer, tensor, *tag):
        ticket = self._transport.post_receive(peer, tensor, *tag)
        if tensor.dtype is self._dtype:
            self._serials.add(ticket.serial)
        return ticket

    def wait(self, ticket, *limit_s):
        if ticket.is_send or ticket.serial not in self._serials:
            self._transport.wait(ticket, *limit_s)


def without_waits(dtype):
    """Return what gives a function, whose first argument is a transport, one without waits."""
    return lambda original: lambda transport, *rest: original(WithoutWaits(transport, dtype), *rest)


def following_without_wait(original):
    def follow(queue, ticket):
        message, reached = queue._posted.pop(ticket.serial), queue._make_marker()
        reached.record()
        queue._followed.append(_Followed(ticket, message, reached, 0))

    return follow


def dropping_what_is_sent(original):
    def opened(transport, ticket, pending):
        original(transport, ticket, pending)
        if isinstance(pending, QueuedMessage) and ticket.is_send:
            del transport._open[ticket.serial]
        return ticket

    return opened


def in_one_queue(original):
    def connect(*place, **options):
        upward, _, *sums = original(*place, **options)
        return [upward, upward, *sums]

    return connect


def without_the_last_tensor(original):
    def arrive(receiver, incoming):
        if incoming.is_posted and incoming.is_forward:
            incoming.tickets[-1:] = []
        original(receiver, incoming)

    return arrive


def freed_before_their_copy_ends(original):
    def emptied(storage):
        side, content = torch.Stream("emu"), _bytes_in(storage)
        side.wait_stream(torch.accelerator.current_stream())
        copy = torch.empty(content.shape, dtype=content.dtype, pin_memory=True)
        with side:
            copy.copy_(content, non_blocking=True)
        del content
        storage.resize_(0)
        return storage, copy

    return emptied


FAULTS = {
    "the stream does not wait for a receive": Fault(
        FOLLOWING, f"{TRANSPORT}device_queue:DeviceQueue.follow", following_without_wait,
        UNORDERED, ("recv from", "native_layer_norm"),
    ),
    "the transport does not keep what it sends": Fault(
        WAITING, f"{TRANSPORT}torch_dist:TorchTransport._opened", dropping_what_is_sent, FREED, ("send to", "free"),
    ),
    "one communicator carries both directions": Fault(
        WAITING, f"{TRANSPORT}torch_dist:connect_devices", in_one_queue, HANG,
    ),
    "copies of a batch do not wait until their memory is free": Fault(
        training("gpipe", memory="pinned"), "penstock.execute.batch.host_to_device:HostToDevice._reserve",
        lambda original: lambda copies, like: replace(original(copies, like), is_free=torch.Event("emu")),
        REUSED, ("", "copy to the device"),
    ),
    "losses go to the device from memory that is not pinned": Fault(
        FOLLOWING, "penstock.execute.losses.exchange:is_queued", lambda original: lambda device: False,
        HOST_WAITS, ("copy to the device",),
    ),
    "a checkpoint is written before its copies are there": Fault(
        scenarios.saved_checkpoints, "penstock.checkpoints.staging:synchronize", lambda original: lambda device: None,
        PINNED, ("copy to the host", "the host"),
    ),
    "the stream waits for the first tensor of a message only": Fault(
        scenarios.several_tensors, f"{TRANSPORT}messages:Receiver._arrive", without_the_last_tensor,
        UNORDERED, ("recv from", "mul"),
    ),
    "the memory of activations is freed before their copy has ended": Fault(
        scenarios.offloaded_activations, "penstock.execute.stages.offloading:_emptied", freed_before_their_copy_ends,
        FREED, ("copy to the host", "free"),
    ),
    "copies of a parameter are compared before they are there": Fault(
        scenarios.checked_values, f"{OBSERVING}copies:_require_equal", without_waits(torch.float32),
        UNORDERED, ("recv from", ""),
    ),
    "the time of another host is read before it is there": Fault(
        scenarios.compared_clocks, f"{OBSERVING}clock:ask", without_waits(torch.float64),
        UNORDERED, ("recv from", "copy to the host"),
    ),
    "the state of another rank is read before it is there": Fault(
        scenarios.state_of_all_ranks, "penstock.execute.stages.model_state:_receive", without_waits(torch.uint8),
        UNORDERED, ("recv from", ""),
    ),
    "rows of another replica are used before they are there": Fault(
        scenarios.exchanged_rows, "penstock.checkpoints.row_exchange:exchange_rows", without_waits(torch.uint8),
        UNORDERED, ("recv from", ""),
    ),
    "an average over replicas is used before it is there": Fault(
        scenarios.reductions, "penstock.execute.parameters.averaged:QueuedMessage",
        lambda original: lambda work, tensor: SimpleNamespace(wait=lambda deadline_s: None),
        UNORDERED, ("all_reduce", "mul"),
    ),
    "what messages hold dies before an abort has ended them": Fault(
        scenarios.an_allocation_beside_an_abort, f"{TRANSPORT}torch_dist:TorchTransport._forget",
        lambda original: lambda transport: (original(transport)[0], []), FREED, ("recv from", "free"),
    ),
    "the time of a layer is read before the device has run it": Fault(
        scenarios.measured_layers, "penstock.train.measuring.measure:synchronize", lambda original: lambda device: None,
        WRONG_TIME,
    ),
}  # fmt: skip
