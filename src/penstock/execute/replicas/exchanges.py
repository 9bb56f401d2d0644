"""`ReplicaExchanges`: a rank's gathers and reductions over the replicas, in the order in which they were launched.

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
from penstock.execute.transport.protocol import Ticket, Transport, wait_for_all
from penstock.execute.transport.torch_dist import TorchTransport
from penstock.execute.undocumented_backends import Backend, gather_into, sum_in_place, sum_into

KEPT_BYTES = 2**26
"""The most that a rank keeps in buffers between CPUs."""
SMALL_BYTES = 2**18
"""The largest buffer that is kept for later gathers and scattered sums."""

UseResults = Callable[[Sequence[Tensor]], None]
"""Takes the results of an exchange."""
Serial = int
"""Stands for an exchange; whoever has it does not hold the buffers."""


class ReplicaExchanges:
    """The exchanges of one rank that are under way."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._is_on_device = bool(getattr(transport, "sums_on_devices", False))
        self._launched: dict[Serial, _Exchange] = {}
        self._num_launched = 0
        self._spare_buffers: list[Tensor] = []
        """Buffers for later exchanges."""

    # ---- buffers

    def buffer_for(self, num_elements: int, like: Tensor) -> Tensor:
        """Return a buffer that all replicas can share out, with zeros behind so many elements: [elements + padding]."""
        num_replicas = self.transport.num_ranks
        size = -(-num_elements // num_replicas) * num_replicas
        kinds = [(spare.numel(), spare.dtype) for spare in self._spare_buffers]
        kind = (size, like.dtype)
        buffer = self._spare_buffers.pop(kinds.index(kind)) if kind in kinds else like.new_empty(size)
        buffer[num_elements:] = 0
        return buffer

    def keep(self, buffer: Tensor) -> None:
        """Take back a buffer that nobody uses any more. A new one would cost the system as much time as filling it."""
        if not self._is_on_device and self.kept_bytes + buffer.nbytes <= KEPT_BYTES:
            self._spare_buffers.append(buffer)

    @property
    def kept_bytes(self) -> int:
        """The bytes of the buffers that are kept now for later exchanges."""
        return sum(buffer.nbytes for buffer in self._spare_buffers)

    def buffers(self) -> list[Tensor]:
        """Return all buffers that are held now."""
        return [
            *self._spare_buffers,
            *(buffer for exchange in self._launched.values() for buffer in exchange.buffers()),
        ]

    # ---- exchanges

    def sum(self, buffers: Sequence[Tensor], use_results: UseResults) -> Serial:
        """Begin to sum buffers of `buffer_for` in place; they are the exchange's until it is complete.

        `use_results` is called with them when they are the sums.
        """
        if self._is_on_device:
            tickets = [self._post(buffer, partial(sum_in_place, tensor=buffer)) for buffer in buffers]
            return self._launch(_Exchange(self.transport, buffers, lambda: use_results(buffers), tickets))
        return self._launch(_Sum(self.transport, buffers, lambda: use_results(buffers)))

    def gather(self, parts: Sequence[Tensor], use_results: UseResults) -> Serial:
        """Begin to gather the parts of all replicas: each [part], which nobody writes to meanwhile, becomes [D x part].

        `use_results` is called with the results when they are there; their buffers are free again when it returns.
        """
        results = [self.buffer_for(self.transport.num_ranks * part.numel(), part) for part in parts]
        if self._is_on_device:
            pairs = zip(results, parts, strict=True)
            tickets = [self._post(result, partial(gather_into, gathered=result, part=part)) for result, part in pairs]
            return self._launch(_Exchange(self.transport, results, lambda: use_results(results), tickets))
        return self._launch(
            _Gather(self.transport, results, parts, lambda: self._pass_on(results, results, use_results))
        )

    def scatter(self, buffers: Sequence[Tensor], use_results: UseResults) -> Serial:
        """Begin to sum buffers of `buffer_for`, each [D x part], of which this rank gets its part: [part].

        `use_results` is called as for `gather`.
        """
        if self._is_on_device:
            parts = [buffer.new_empty(buffer.numel() // self.transport.num_ranks) for buffer in buffers]
            pairs = zip(parts, buffers, strict=True)
            tickets = [self._post(part, partial(sum_into, part=part, summands=buffer)) for part, buffer in pairs]
            return self._launch(_Exchange(self.transport, [*buffers, *parts], lambda: use_results(parts), tickets))
        parts = [buffer.view(self.transport.num_ranks, -1)[self.transport.rank] for buffer in buffers]
        return self._launch(_ScatteredSum(self.transport, buffers, lambda: self._pass_on(parts, buffers, use_results)))

    def complete(self, serial: Serial) -> None:
        """Wait until an exchange is over, and those launched before it. Raises: PeerLost, DeadlineExceeded."""
        if serial not in self._launched:
            return
        for exchange in self._launched.values():
            exchange.add_up()
        for earlier in [exchange for exchange in self._launched if exchange <= serial]:
            self._launched.pop(earlier).complete()

    def forget(self) -> None:
        """Forget all exchanges that are under way, as after a failure."""
        self._launched.clear()

    def _post(self, buffer: Tensor, begin: Callable[[Backend], dist.Work]) -> Ticket:
        ticket: Ticket = self.transport.post_exchange(buffer, begin)  # type: ignore[attr-defined]
        return ticket

    def _launch(self, exchange: "_Exchange") -> Serial:
        self._num_launched += 1
        self._launched[self._num_launched] = exchange
        return self._num_launched

    def _pass_on(self, results: Sequence[Tensor], buffers: Sequence[Tensor], use_results: UseResults) -> None:
        """Call `use_results`, then keep the small buffers for later exchanges."""
        use_results(results)
        for buffer in buffers:
            # Only small buffers are kept, one of each size: sharding is there to save memory, and few exchanges are
            # under way at once.
            kinds = [(spare.numel(), spare.dtype) for spare in self._spare_buffers]
            if (buffer.numel(), buffer.dtype) not in kinds and buffer.nbytes <= SMALL_BYTES:
                self.keep(buffer)


def exchanges_of(places: Places, *, is_sharded: bool) -> ReplicaExchanges | None:
    """Return the exchanges of a rank; None where there is nothing to exchange."""
    if places.data is not None:
        if isinstance(places.data, TorchTransport):
            # Both transports have one device, on which an exchange begins behind the messages of the pipeline.
            places.data.is_device_held_up = held_up_of(places.pipeline)
        return ReplicaExchanges(places.data)
    return ReplicaExchanges(LocalTransport.create(1, places.pipeline.deadline_s)[0]) if is_sharded else None


class _Exchange:
    """One gather or reduction, which calls `use_results` when it is over; this one is over with its tickets."""

    def __init__(
        self,
        transport: Transport,
        buffers: Sequence[Tensor],
        use_results: Callable[[], None],
        tickets: Sequence[Ticket] = (),
    ) -> None:
        self._transport, self._buffers, self._use_results = transport, buffers, use_results
        self._tickets = list(tickets)
        self._peers = [rank for rank in range(transport.num_ranks) if rank != transport.rank]

    def buffers(self) -> Sequence[Tensor]:
        """Return the tensors that the exchange holds."""
        return self._buffers

    def add_up(self) -> None:
        """Do the part of a sum that needs only the terms of the other replicas; a second call does nothing."""

    def complete(self) -> None:
        """Wait until the exchange is over. Raises: PeerLost, DeadlineExceeded."""
        wait_for_all(self._transport, self._tickets)
        self._use_results()


class _Gather(_Exchange):
    """A gather between CPUs."""

    def __init__(
        self,
        transport: Transport,
        results: Sequence[Tensor],
        parts: Sequence[Tensor],
        use_results: Callable[[], None],
    ) -> None:
        super().__init__(transport, results, use_results)
        self._gathered_parts = [result.view(transport.num_ranks, -1) for result in results]
        self._parts = parts
        self._sends = [transport.post_send(rank, part) for part in parts for rank in self._peers]
        self._receives = [
            transport.post_receive(rank, parts_of_replicas[rank])
            for parts_of_replicas in self._gathered_parts
            for rank in self._peers
        ]

    def complete(self) -> None:
        for parts_of_replicas, part in zip(self._gathered_parts, self._parts, strict=True):
            parts_of_replicas[self._transport.rank].copy_(part)
        wait_for_all(self._transport, self._receives)
        self._use_results()
        wait_for_all(self._transport, self._sends)


class _ScatteredSum(_Exchange):
    """A scattered sum between CPUs."""

    def __init__(self, transport: Transport, buffers: Sequence[Tensor], use_results: Callable[[], None]) -> None:
        self._parts = [buffer.view(transport.num_ranks, -1) for buffer in buffers]
        super().__init__(transport, self._parts, use_results)
        self._sends = [[transport.post_send(rank, parts[rank]) for rank in self._peers] for parts in self._parts]
        """Tickets of the parts that go to the other replicas, one list per buffer."""
        self._peer_terms = [
            [
                # A part that has left makes room for the term of its receiver: both are of one size.
                parts[rank] if ticket.is_over else torch.empty_like(parts[rank])
                for rank, ticket in zip(self._peers, tickets, strict=True)
            ]
            for parts, tickets in zip(self._parts, self._sends, strict=True)
        ]
        """The other replicas' terms of this rank's part, one list per buffer."""
        self._receives = [
            [transport.post_receive(rank, term) for rank, term in zip(self._peers, terms, strict=True)]
            for terms in self._peer_terms
        ]

    def buffers(self) -> Sequence[Tensor]:
        return [*self._parts, *(term for terms in self._peer_terms for term in terms)]

    def complete(self) -> None:
        for index, _ in enumerate(self._parts):
            self._add(index)
        self._use_results()

    def _add(self, index: int) -> None:
        """Add up this rank's part of one buffer in place, in the order of replicas.

        Raises:
            PeerLost, DeadlineExceeded: a term does not come.
        """
        wait_for_all(self._transport, self._receives[index])
        replica, peer_terms = self._transport.rank, self._peer_terms[index]
        total = self._parts[index][replica]
        if replica > 0:  # the terms of replicas before this one come first; the memory of the first term has their sum
            for term in peer_terms[1:replica]:
                peer_terms[0].add_(term)
            torch.add(peer_terms[0], total, out=total)
        for term in peer_terms[replica:]:
            total.add_(term)
        self._peer_terms[index] = []
        # Later receives write to the memory that was sent, so it must have left.
        wait_for_all(self._transport, self._sends[index])


class _Sum(_ScatteredSum):
    """A sum between CPUs: each replica sends the part that it has added up to all."""

    _is_added_up = False

    def add_up(self) -> None:
        """Add up this rank's parts, and send them to all. Raises: PeerLost, DeadlineExceeded."""
        if self._is_added_up:
            return
        self._is_added_up = True
        self._sum_receives: list[Ticket] = []
        self._sum_sends: list[Ticket] = []
        replica, transport = self._transport.rank, self._transport
        for index, parts in enumerate(self._parts):
            # A buffer is sent right after it was added up: it is still in a cache, and the others can go on.
            self._add(index)
            self._sum_sends += [transport.post_send(rank, parts[replica]) for rank in self._peers]
            self._sum_receives += [transport.post_receive(rank, parts[rank]) for rank in self._peers]

    def complete(self) -> None:
        self.add_up()
        wait_for_all(self._transport, [*self._sum_receives, *self._sum_sends])
        self._use_results()
