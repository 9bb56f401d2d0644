"""The backends of torch.distributed that carry what sockets do not: gloo between CPUs, NCCL between GPUs."""

from dataclasses import dataclass

import torch
from torch.distributed.distributed_c10d import Store

from penstock.execute.accelerator import is_queued
from penstock.execute.transport.device_links import connect_devices
from penstock.execute.transport.protocol import Tag
from penstock.execute.undocumented_backends import Backend, gloo


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


def connect_links(ends: Ends, *, needs_control: bool, has_sums: bool = False) -> Links:
    """Connect what sockets do not carry: control where `needs_control`, and the data of accelerators.

    `has_sums`: whether these sum over all ranks, too. Raises: RuntimeError.
    """
    control = gloo(ends.store, ends.rank, ends.num_ranks, ends.deadline_s) if needs_control else None
    if not is_queued(ends.device):
        return Links(control, control, control)
    upward, downward, *sums = connect_devices(
        ends.store, ends.rank, ends.num_ranks, ends.device, ends.deadline_s, has_sums=has_sums
    )
    return Links(upward, downward, control, *sums)
