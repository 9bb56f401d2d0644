"""Sums over replicas, by messages of Penstock's own: each replica adds up one part of a buffer and gives it to all.

    launch      part 0 | part 1 | part 2     to replica r goes its part of every other replica, nothing is waited for
    add up      own part: that of replica 0, plus that of 1, plus that of 2
    complete    the sums of all parts come from the replicas that have added them up

A rank sends (D-1)/D of the bytes in each of the two halves. The order of the additions is that of the replicas, so all
get the same bits, with any number of threads and in any order of arrival.

The first wait adds up all that was launched before it, then completes what it waits for. Replicas run one program, so
they launch and wait in one order, and their messages need no names.

Between accelerators the backend sums by itself, on a communicator of its own, beside computations and messages.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.execute.transport.protocol import Ticket, Transport

KEPT_BYTES = 2**26
"""The most that a rank keeps in buffers from one step to the next."""


class Reductions:
    """The reductions of one rank that are under way."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._is_on_device = bool(getattr(transport, "sums_on_devices", False))
        self._launched: list[Reduction] = []
        self._kept: list[Tensor] = []
        """Buffers for later reductions."""

    @property
    def transport(self) -> Transport:
        return self._transport

    def room_for(self, num_elements: int, like: Tensor) -> Tensor:
        """Return a buffer that all replicas can share out, with zeros behind so many elements: [elements + padding]."""
        num_replicas = self._transport.num_ranks
        size = -(-num_elements // num_replicas) * num_replicas
        fitting = (place for place, each in enumerate(self._kept) if each.numel() == size and each.dtype == like.dtype)
        place = next(fitting, None)
        buffer = like.new_empty(size) if place is None else self._kept.pop(place)
        buffer[num_elements:] = 0
        return buffer

    def keep(self, buffer: Tensor) -> None:
        """Take back a buffer that nobody uses any more. A new one would cost the system as much time as filling it."""
        if not self._is_on_device and sum(each.nbytes for each in self._kept) + buffer.nbytes <= KEPT_BYTES:
            self._kept.append(buffer)

    def launch(self, buffers: Sequence[Tensor]) -> "Reduction":
        """Begin to sum buffers of `room_for` in place; they are the reduction's until it is complete."""
        reduction = (_DeviceReduction if self._is_on_device else _MessageReduction)(self._transport, buffers)
        self._launched.append(reduction)
        return reduction

    def complete(self, reduction: "Reduction") -> None:
        """Wait until a reduction has its sums. Raises: PeerLost, DeadlineExceeded."""
        for each in self._launched:
            each.add_up()
        self._launched.remove(reduction)
        reduction.complete()

    def forget(self) -> None:
        """Forget all of them, as after a failure."""
        self._launched.clear()


class Reduction(Protocol):
    """One reduction."""

    def add_up(self) -> None:
        """Do all that needs no more than the values of the others; a second time does nothing."""
        ...

    def complete(self) -> None:
        """Wait for the sums. Raises: PeerLost, DeadlineExceeded."""
        ...


class _DeviceReduction:
    def __init__(self, transport: Transport, buffers: Sequence[Tensor]) -> None:
        self._transport = transport
        self._tickets = [transport.post_sum(buffer) for buffer in buffers]  # type: ignore[attr-defined]

    def add_up(self) -> None: ...

    def complete(self) -> None:
        for ticket in self._tickets:
            self._transport.wait(ticket)


class _MessageReduction:
    def __init__(self, transport: Transport, buffers: Sequence[Tensor]) -> None:
        self._transport = transport
        self._parts = [buffer.view(transport.num_ranks, -1) for buffer in buffers]
        own = transport.rank
        self._others = [rank for rank in range(transport.num_ranks) if rank != own]
        self._leaving = [transport.post_send(rank, parts[rank]) for parts in self._parts for rank in self._others]
        left = iter([ticket.is_over for ticket in self._leaving])
        self._theirs = [
            # In the place of what has left; as much comes from a rank as goes to it.
            [parts[rank] if next(left) else torch.empty_like(parts[rank]) for rank in self._others]
            for parts in self._parts
        ]
        """What the others have of this rank's part."""
        self._coming = [
            transport.post_receive(rank, room)
            for rooms in self._theirs
            for rank, room in zip(self._others, rooms, strict=True)
        ]
        self._is_added_up = False

    def add_up(self) -> None:
        """Add up this rank's part, and send it to all. Raises: PeerLost, DeadlineExceeded."""
        if self._is_added_up:
            return
        self._is_added_up = True
        self._wait(self._coming)
        own, transport = self._transport.rank, self._transport
        for parts, theirs in zip(self._parts, self._theirs, strict=True):
            terms = [*theirs[:own], parts[own], *theirs[own:]]
            total = terms[0]
            for term in terms[1:]:
                total.add_(term)
            if own > 0:
                parts[own].copy_(total)
        self._theirs = []
        # Received into what was sent: not before it has left.
        self._wait(self._leaving)
        self._leaving = [transport.post_send(rank, parts[own]) for parts in self._parts for rank in self._others]
        self._coming = [transport.post_receive(rank, parts[rank]) for parts in self._parts for rank in self._others]

    def complete(self) -> None:
        """Wait for the sums of all parts. Raises: PeerLost, DeadlineExceeded."""
        self._wait(self._coming)
        self._wait(self._leaving)
        self._coming, self._leaving = [], []

    def _wait(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self._transport.wait(ticket)
