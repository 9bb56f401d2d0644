"""The backends of torch.distributed that carry what sockets do not: gloo between CPUs, NCCL between GPUs."""

from dataclasses import dataclass
from datetime import timedelta
from itertools import permutations

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.execute.accelerator import is_queued
from penstock.execute.transport.pending import QueuedMessage
from penstock.execute.transport.protocol import Tag
from penstock.execute.undocumented import Backend, device_backend, gloo

WATCHDOG = timedelta(days=1)
"""NCCL's own limit of a message, counted from its posting; what exceeds it ends the process, not the step."""


@dataclass(frozen=True, slots=True)
class Links:
    """The backends that carry messages: data to a higher rank, data to a lower rank, and control.

    Gloo matches messages in order per direction and tag, so one backend is all three. An NCCL communicator is one queue
    for both directions and knows no tags: a receive posted ahead would block the sends behind it. There it takes two
    for data, and control goes over gloo.
    """

    upward: Backend | None = None
    downward: Backend | None = None
    control: Backend | None = None
    """None where every message of control goes over a socket, and so with data."""
    sums: Backend | None = None
    """Between accelerators, for sums over all ranks, which run beside the messages."""

    def between(self, source: int, destination: int, tag: Tag) -> Backend | None:
        if tag is Tag.CONTROL:
            return self.control
        return self.upward if source < destination else self.downward

    def distinct(self) -> list[Backend]:
        links = (self.upward, self.downward, self.control, self.sums)
        return list({id(link): link for link in links if link is not None}.values())


NO_LINKS = Links()


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """One rank among those that connect."""

    store: Store
    """Of this connection alone."""
    rank: int
    num_ranks: int
    device: torch.device
    deadline_s: float

    def backend(self, name: str) -> Backend:
        """Connect the devices of all ranks. Raises: RuntimeError."""
        return device_backend(self.device, PrefixStore(name, self.store), self.rank, self.num_ranks, WATCHDOG)


def connect_links(ends: Ends, *, needs_control: bool, has_sums: bool = False) -> Links:
    """Connect what sockets do not carry: control where `needs_control`, and the data of accelerators.

    `has_sums`: whether these sum over all ranks, too. Raises: RuntimeError.
    """
    rank, num_ranks, deadline_s = ends.rank, ends.num_ranks, ends.deadline_s
    control = gloo(ends.store, rank, num_ranks, deadline_s) if needs_control else None
    if not is_queued(ends.device):
        return Links(control, control, control)
    upward, downward = ends.backend("upward"), ends.backend("downward")
    # NCCL connects a pair at its first message and blocks both ends meanwhile; in program order that may deadlock. So
    # one number goes over every channel here, in one order on all ranks.
    number = torch.zeros(1, device=ends.device)
    for source, destination in permutations(range(num_ranks), 2):
        link = upward if source < destination else downward
        if rank == source:
            QueuedMessage(link.send([number], destination, Tag.DATA), number).wait(deadline_s)
        elif rank == destination:
            QueuedMessage(link.recv([number], source, Tag.DATA), number).wait(deadline_s)
    sums = ends.backend("sums") if has_sums else None
    if sums is not None:
        QueuedMessage(sums.allreduce([number]), number).wait(deadline_s)
    return Links(upward, downward, control, sums)
