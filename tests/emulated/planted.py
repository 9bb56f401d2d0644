"""A sample of faults of ordering and lifetime in Penstock, one for each kind of report.

A fault replaces one name: `make` takes what the name stands for, and returns what it stands for with the fault.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch

from penstock.execute.transport.backend_links import QueuedMessage
from penstock.execute.transport.device_queue import _FollowedReceive
from tests.emulated import planted_scenarios as scenarios
from tests.emulated.checker import FREED, HANG, PINNED, REUSED, UNORDERED
from tests.emulated.pipelines import Cell, train
from tests.emulated.planting import replaced

HOST_WAITS = "more waits of the host"
"""What tells of a fault without a report of the checker."""
TRANSPORT = "penstock.execute.transport."


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


def following_without_wait(original):
    def follow(queue, ticket):
        message, reached = queue._posted.pop(ticket.serial), queue._make_marker()
        reached.record()
        queue._receives.append(_FollowedReceive(ticket, message, reached, 0))

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
    "what messages hold dies before an abort has ended them": Fault(
        scenarios.an_allocation_beside_an_abort, f"{TRANSPORT}torch_dist:TorchTransport._forget",
        lambda original: lambda transport: (original(transport)[0], []), FREED, ("recv from", "free"),
    ),
}  # fmt: skip
