"""A transport whose ranks are threads of one process, for tests and notebooks.

As on a socket, a message moves when both ends are posted, whoever came last moves it, and a send is over once its
receive has been filled. So a program that runs here does not rely on buffering that another transport lacks.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import Condition

import torch
from torch import Tensor

from penstock.errors import PipelineError
from penstock.execute.transport import collectives
from penstock.execute.transport.protocol import (
    Ticket,
    WaitObserver,
    deadline_exceeded,
    missing_ranks,
    peer_lost,
    require_contiguous,
)

Delay = Callable[[int, int], float]
PIPELINE_LANE, COLLECTIVE_LANE = range(2)


@dataclass(slots=True, eq=False)
class _Message:
    """One posted end of a message."""

    tensor: Tensor
    ready_s: float
    """`time.monotonic()` before which a slow channel does not show it."""
    is_done: bool = False
    problem: str = ""


@dataclass(slots=True, eq=False)
class _Channel:
    """Messages from one rank to one other whose second end is not posted yet."""

    sends: deque[_Message] = field(default_factory=deque)
    receives: deque[_Message] = field(default_factory=deque)

    def deliver(self) -> bool:
        """Move what can move now, in order; tell whether anything did."""
        has_moved = False
        while self.sends and self.receives and self.sends[0].ready_s <= time.monotonic():
            _move(self.sends.popleft(), self.receives.popleft())
            has_moved = True
        return has_moved

    def next_ready_s(self) -> float:
        """Tell when time alone lets a message move."""
        return self.sends[0].ready_s if self.sends and self.receives else float("inf")


def _move(sent: _Message, received: _Message) -> None:
    source, target = sent.tensor, received.tensor
    if source.shape == target.shape and source.dtype == target.dtype:
        target.copy_(source)
    else:
        problem = (
            f"sent {tuple(source.shape)} {source.dtype}, expected {tuple(target.shape)} {target.dtype}; "
            "both ends must agree on shape and type"
        )
        sent.problem = received.problem = problem
    sent.is_done = received.is_done = True


class _Hub:
    """What the ranks of one process share; everything in it is guarded by `changed`."""

    def __init__(self, num_ranks: int, delay_s: Delay) -> None:
        self.num_ranks = num_ranks
        self.delay_s = delay_s
        self.changed = Condition()
        self.channels: dict[tuple[int, int, int], _Channel] = {}
        self.aborted_by: int | None = None
        self.closed: set[int] = set()
        self.recovering: set[int] = set()
        self.gave_up_s: dict[int, float] = {}
        """Per rank, `time.monotonic()` at which it last gave up to wait for a fresh start."""
        self.generation = 0

    def channel(self, source: int, destination: int, lane: int) -> _Channel:
        return self.channels.setdefault((source, destination, lane), _Channel())

    def trouble(self, peer: int) -> str:
        """Say why nothing can come from this peer any more, if so."""
        if self.aborted_by is not None:
            return f"rank {self.aborted_by} aborted"
        return f"rank {peer} has closed its transport" if peer in self.closed else ""

    def missing_since(self, begin_s: float) -> list[int]:
        """Ranks that do not wait for a fresh start; not those whose wait ended just before, if there are others."""
        missing = set(range(self.num_ranks)) - self.recovering
        never_came = {rank for rank in missing if self.gave_up_s.get(rank, 0.0) < begin_s}
        return sorted(never_came or missing)

    def start_afresh(self) -> None:
        self.channels.clear()
        self.aborted_by = None
        self.recovering.clear()
        self.generation += 1
        self.changed.notify_all()


class LocalTransport:
    """One rank of a process; make all of them with `create`."""

    def __init__(self, hub: _Hub, rank: int, deadline_s: float) -> None:
        self.rank = rank
        self.num_ranks = hub.num_ranks
        self.deadline_s = deadline_s
        self._hub = hub
        self._observer: WaitObserver | None = None
        self._open: dict[int, tuple[_Channel, _Message]] = {}
        self._next_serial = 0
        self._first_serial = 0

    @classmethod
    def create(
        cls, num_ranks: int, deadline_s: float = 60.0, *, delay_s: Delay | None = None
    ) -> "list[LocalTransport]":
        """Connect `num_ranks` ranks; use each from one thread of its own.

        `delay_s(source, destination)` gives the seconds that a message needs on that channel, to play a slow wire;
        collectives have wires of their own.
        """
        hub = _Hub(num_ranks, delay_s or (lambda source, destination: 0.0))
        return [cls(hub, rank, deadline_s) for rank in range(num_ranks)]

    def post_send(self, peer: int, tensor: Tensor) -> Ticket:
        return self._post(PIPELINE_LANE, peer, tensor, is_send=True)

    def post_receive(self, peer: int, tensor: Tensor) -> Ticket:
        return self._post(PIPELINE_LANE, peer, tensor, is_send=False)

    def wait(self, ticket: Ticket) -> None:
        self._wait(ticket, self.deadline_s)

    def watch(self, observer: WaitObserver) -> None:
        self._observer = observer

    def all_reduce(self, tensor: Tensor) -> None:
        collectives.all_reduce(self._lane(tensor.device), tensor)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        collectives.broadcast(self._lane(tensor.device), tensor, root)

    def all_gather_object(self, value: object) -> list[object]:
        return collectives.all_gather_object(self._lane(torch.device("cpu")), value)

    def abort(self) -> None:
        with self._hub.changed:
            self._hub.aborted_by = self.rank
            self._hub.changed.notify_all()

    def recover(self) -> None:
        self._first_serial = self._next_serial
        self._open.clear()
        begin_s = time.monotonic()
        hub = self._hub
        with hub.changed:
            generation = hub.generation
            hub.recovering.add(self.rank)
            if len(hub.recovering) == self.num_ranks:
                hub.start_afresh()
            hub.changed.wait_for(lambda: hub.generation > generation, self.deadline_s)
            if hub.generation == generation:
                missing = hub.missing_since(begin_s)
                hub.recovering.discard(self.rank)
                hub.gave_up_s[self.rank] = time.monotonic()
                raise missing_ranks(self.rank, missing, time.monotonic() - begin_s)

    def close(self) -> None:
        with self._hub.changed:
            self._hub.closed.add(self.rank)
            self._open.clear()
            self._hub.changed.notify_all()

    def _post(self, lane: int, peer: int, tensor: Tensor, *, is_send: bool) -> Ticket:
        ticket = Ticket(peer, is_send, self._next_serial)
        if not is_send:
            require_contiguous(self.rank, ticket, tensor)
        hub = self._hub
        with hub.changed:
            if trouble := hub.trouble(peer):
                raise peer_lost(self.rank, ticket, 0.0, trouble)
            source, destination = (self.rank, peer) if is_send else (peer, self.rank)
            delay_s = hub.delay_s(source, destination) if is_send and lane == PIPELINE_LANE else 0.0
            channel = hub.channel(source, destination, lane)
            message = _Message(tensor.detach(), time.monotonic() + delay_s)
            (channel.sends if is_send else channel.receives).append(message)
            self._open[ticket.serial] = (channel, message)
            self._next_serial += 1
            if channel.deliver() or delay_s > 0:  # who waits for a slow message must learn when it comes
                hub.changed.notify_all()
        return ticket

    def _wait(self, ticket: Ticket, deadline_s: float) -> None:
        begin_s = time.monotonic()
        if ticket.serial < self._first_serial:
            raise peer_lost(self.rank, ticket, 0.0, "recover() forgot this message")
        if ticket.serial not in self._open:
            return
        channel, message = self._open[ticket.serial]
        hub = self._hub
        if self._observer is not None:
            self._observer.note_wait(ticket.peer)
        with hub.changed:
            while not self._is_moved(channel, message):
                now_s = time.monotonic()
                if trouble := hub.trouble(ticket.peer):
                    raise peer_lost(self.rank, ticket, now_s - begin_s, trouble)
                if now_s >= begin_s + deadline_s:
                    raise deadline_exceeded(self.rank, ticket, now_s - begin_s, self.deadline_s)
                hub.changed.wait(min(begin_s + deadline_s, channel.next_ready_s()) - now_s)
        del self._open[ticket.serial]
        if self._observer is not None:
            self._observer.note_run()
        if message.problem:
            raise PipelineError(f"rank {self.rank}: message of rank {ticket.peer}: {message.problem}", rank=self.rank)

    def _is_moved(self, channel: _Channel, message: _Message) -> bool:
        if channel.deliver():
            self._hub.changed.notify_all()
        return message.is_done

    def _lane(self, device: torch.device) -> collectives.Lane:
        return collectives.Lane(
            self.rank,
            self.num_ranks,
            time.monotonic() + self.deadline_s,
            device,
            partial(self._post, COLLECTIVE_LANE, is_send=True),
            partial(self._post, COLLECTIVE_LANE, is_send=False),
            self._wait,
        )
