"""The lane of a rank: its gathers and reductions over the replicas, in the order in which they were launched.

    gather            part 0 | part 1 | part 2     a replica sends its part to all others
    scattered sum     part 0 | part 1 | part 2     to replica r goes its part of every other one, and r adds up
    sum               a scattered sum; then each replica sends the part that it has added up to all

Nothing is waited for when one is launched. A rank sends (D-1)/D of the bytes for a gather or a scattered sum, twice
that for a sum. These are messages of Penstock's own. The order of the additions is that of the replicas, so all get the
same bits, with any number of threads and in any order of arrival.

Replicas run one program, so they launch and wait in one order, and their messages need no names. A wait for one
exchange completes those launched before it too. The first wait for a sum adds up all that was launched before it.

Between accelerators the backend does it by itself, on a communicator of its own, beside computations and messages.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.execute.transport.device_queue import held_up_of
from penstock.execute.transport.local import LocalTransport
from penstock.execute.transport.places import Places
from penstock.execute.transport.protocol import Ticket, Transport
from penstock.execute.transport.torch_dist import TorchTransport
from penstock.execute.undocumented_backends import Backend, gather_into, sum_in_place, sum_into

KEPT_BYTES = 2**26
"""The most that a rank keeps in buffers between CPUs."""
SMALL_BYTES = 2**18
"""The largest buffer that is kept for later gathers and scattered sums."""

Then = Callable[[Sequence[Tensor]], None]
"""Takes the results of an exchange."""
Serial = int
"""Stands for an exchange; whoever has it does not hold the buffers."""


class ReplicaLane:
    """The exchanges of one rank that are under way."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._is_on_device = bool(getattr(transport, "sums_on_devices", False))
        self._launched: dict[Serial, _Exchange] = {}
        self._num_launched = 0
        self._kept: list[Tensor] = []
        """Buffers for later exchanges."""

    # ---- buffers

    def room_for(self, num_elements: int, like: Tensor) -> Tensor:
        """Return a buffer that all replicas can share out, with zeros behind so many elements: [elements + padding]."""
        num_replicas = self.transport.num_ranks
        size = -(-num_elements // num_replicas) * num_replicas
        fitting = (place for place, each in enumerate(self._kept) if each.numel() == size and each.dtype == like.dtype)
        place = next(fitting, None)
        buffer = like.new_empty(size) if place is None else self._kept.pop(place)
        buffer[num_elements:] = 0
        return buffer

    def keep(self, buffer: Tensor) -> None:
        """Take back a buffer that nobody uses any more. A new one would cost the system as much time as filling it."""
        if not self._is_on_device and self.kept_bytes + buffer.nbytes <= KEPT_BYTES:
            self._kept.append(buffer)

    @property
    def kept_bytes(self) -> int:
        """The bytes that it keeps now in buffers for later exchanges."""
        return sum(each.nbytes for each in self._kept)

    def buffers(self) -> list[Tensor]:
        """Return all that it holds now."""
        return [*self._kept, *(buffer for each in self._launched.values() for buffer in each.buffers())]

    # ---- exchanges

    def sum(self, buffers: Sequence[Tensor], then: Then) -> Serial:
        """Begin to sum buffers of `room_for` in place; they are the exchange's until it is complete.

        `then` is called with them when they are the sums.
        """
        if self._is_on_device:
            tickets = [self._post(buffer, partial(sum_in_place, tensor=buffer)) for buffer in buffers]
            return self._launch(_Exchange(self.transport, buffers, lambda: then(buffers), tickets))
        return self._launch(_Sum(self.transport, buffers, lambda: then(buffers)))

    def gather(self, parts: Sequence[Tensor], then: Then) -> Serial:
        """Begin to gather the parts of all replicas: each [part], which nobody writes to meanwhile, becomes [D x part].

        `then` is called with the results when they are there; they are the lane's again when it returns.
        """
        wholes = [self.room_for(self.transport.num_ranks * part.numel(), part) for part in parts]
        if self._is_on_device:
            pairs = zip(wholes, parts, strict=True)
            tickets = [self._post(whole, partial(gather_into, whole=whole, part=part)) for whole, part in pairs]
            return self._launch(_Exchange(self.transport, wholes, lambda: then(wholes), tickets))
        return self._launch(_Gather(self.transport, wholes, parts, lambda: self._give(wholes, wholes, then)))

    def scatter(self, buffers: Sequence[Tensor], then: Then) -> Serial:
        """Begin to sum buffers of `room_for`, each [D x part], of which this rank gets its part: [part].

        `then` is called as for `gather`.
        """
        if self._is_on_device:
            parts = [buffer.new_empty(buffer.numel() // self.transport.num_ranks) for buffer in buffers]
            pairs = zip(parts, buffers, strict=True)
            tickets = [self._post(part, partial(sum_into, part=part, whole=buffer)) for part, buffer in pairs]
            return self._launch(_Exchange(self.transport, [*buffers, *parts], lambda: then(parts), tickets))
        parts = [buffer.view(self.transport.num_ranks, -1)[self.transport.rank] for buffer in buffers]
        return self._launch(_ScatteredSum(self.transport, buffers, lambda: self._give(parts, buffers, then)))

    def complete(self, serial: Serial) -> None:
        """Wait until an exchange is over, and those launched before it. Raises: PeerLost, DeadlineExceeded."""
        if serial not in self._launched:
            return
        for each in self._launched.values():
            each.add_up()
        for earlier in [each for each in self._launched if each <= serial]:
            self._launched.pop(earlier).complete()

    def forget(self) -> None:
        """Forget all of them, as after a failure."""
        self._launched.clear()

    def _post(self, held: Tensor, begin: Callable[[Backend], dist.Work]) -> Ticket:
        ticket: Ticket = self.transport.post_exchange(held, begin)  # type: ignore[attr-defined]
        return ticket

    def _launch(self, exchange: "_Exchange") -> Serial:
        self._num_launched += 1
        self._launched[self._num_launched] = exchange
        return self._num_launched

    def _give(self, results: Sequence[Tensor], buffers: Sequence[Tensor], then: Then) -> None:
        then(results)
        for buffer in buffers:
            # Small ones, and one of a size: whoever shares out weights wants the memory, and few are under way at once.
            is_new = all((each.numel(), each.dtype) != (buffer.numel(), buffer.dtype) for each in self._kept)
            if is_new and buffer.nbytes <= SMALL_BYTES:
                self.keep(buffer)


def lane_of(places: Places, *, is_sharded: bool) -> ReplicaLane | None:
    """Return the lane of a rank; None where there is nothing to exchange."""
    if places.data is not None:
        if isinstance(places.data, TorchTransport):
            # Both transports have one device, on which an exchange begins behind the messages of the pipeline.
            places.data.is_device_held_up = held_up_of(places.pipeline)
        return ReplicaLane(places.data)
    return ReplicaLane(LocalTransport.create(1, places.pipeline.deadline_s)[0]) if is_sharded else None


class _Exchange:
    """One gather or reduction; `then` is called when it is over. This one is over with its tickets."""

    def __init__(
        self, transport: Transport, held: Sequence[Tensor], then: Callable[[], None], tickets: Sequence[Ticket] = ()
    ) -> None:
        self._transport, self._held, self._then = transport, held, then
        self._tickets = list(tickets)
        self._others = [rank for rank in range(transport.num_ranks) if rank != transport.rank]

    def buffers(self) -> Sequence[Tensor]:
        """Return what it holds."""
        return self._held

    def add_up(self) -> None:
        """Do all of a sum that needs no more than the values of the others; a second time does nothing."""

    def complete(self) -> None:
        """Wait for its end. Raises: PeerLost, DeadlineExceeded."""
        self._wait(self._tickets)
        self._then()

    def _wait(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self._transport.wait(ticket)


class _Gather(_Exchange):
    """A gather between CPUs."""

    def __init__(
        self, transport: Transport, wholes: Sequence[Tensor], parts: Sequence[Tensor], then: Callable[[], None]
    ) -> None:
        super().__init__(transport, wholes, then)
        self._rooms = [whole.view(transport.num_ranks, -1) for whole in wholes]
        self._parts = parts
        self._leaving = [transport.post_send(rank, part) for part in parts for rank in self._others]
        self._coming = [transport.post_receive(rank, room[rank]) for room in self._rooms for rank in self._others]

    def complete(self) -> None:
        for room, part in zip(self._rooms, self._parts, strict=True):
            room[self._transport.rank].copy_(part)
        self._wait(self._coming)
        self._then()
        self._wait(self._leaving)


class _ScatteredSum(_Exchange):
    """A scattered sum between CPUs."""

    def __init__(self, transport: Transport, buffers: Sequence[Tensor], then: Callable[[], None]) -> None:
        self._parts = [buffer.view(transport.num_ranks, -1) for buffer in buffers]
        super().__init__(transport, self._parts, then)
        self._sent = [[transport.post_send(rank, parts[rank]) for rank in self._others] for parts in self._parts]
        """By buffer, as all that follows."""
        self._theirs = [
            [
                # In the place of what has left; as much comes from a rank as goes to it.
                parts[rank] if ticket.is_over else torch.empty_like(parts[rank])
                for rank, ticket in zip(self._others, tickets, strict=True)
            ]
            for parts, tickets in zip(self._parts, self._sent, strict=True)
        ]
        """The others' terms of this rank's part."""
        self._come = [
            [transport.post_receive(rank, room) for rank, room in zip(self._others, rooms, strict=True)]
            for rooms in self._theirs
        ]

    def buffers(self) -> Sequence[Tensor]:
        return [*self._parts, *(room for rooms in self._theirs for room in rooms)]

    def complete(self) -> None:
        for place, _ in enumerate(self._parts):
            self._add(place)
        self._then()

    def _add(self, place: int) -> None:
        """Add up this rank's part of one buffer, in its place. Raises: PeerLost, DeadlineExceeded."""
        self._wait(self._come[place])
        own, theirs = self._transport.rank, self._theirs[place]
        total = self._parts[place][own]
        if own > 0:  # in the order of replicas: what those before this one have is added up in the first one's room
            for term in theirs[1:own]:
                theirs[0].add_(term)
            torch.add(theirs[0], total, out=total)
        for term in theirs[own:]:
            total.add_(term)
        self._theirs[place] = []
        # Received into what was sent: not before it has left.
        self._wait(self._sent[place])


class _Sum(_ScatteredSum):
    """A sum between CPUs: what each replica has added up goes to all."""

    _is_added_up = False

    def add_up(self) -> None:
        """Add up this rank's parts, and send them to all. Raises: PeerLost, DeadlineExceeded."""
        if self._is_added_up:
            return
        self._is_added_up = True
        self._coming: list[Ticket] = []
        self._leaving: list[Ticket] = []
        own, transport = self._transport.rank, self._transport
        for place, parts in enumerate(self._parts):
            # One buffer after the other: what was added up is still in a cache, and others go on with it.
            self._add(place)
            self._leaving += [transport.post_send(rank, parts[own]) for rank in self._others]
            self._coming += [transport.post_receive(rank, parts[rank]) for rank in self._others]

    def complete(self) -> None:
        self.add_up()
        self._wait([*self._coming, *self._leaving])
        self._then()
