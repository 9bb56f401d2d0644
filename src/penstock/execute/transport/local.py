"""A transport whose ranks are threads of one process, for tests and notebooks.

As on a socket, a message moves when both ends are posted, whoever came last moves it, and a send is over once its
receive has been filled. So a program that runs here does not rely on buffering that another transport lacks.

With an `order_seed` messages move in an order drawn from it, any that keeps each channel's: a message moves only when
every rank waits, has closed its transport or recovers, and then the next channel is drawn. As each rank does the same
between two waits, the order depends on the seed alone, and not on the system's scheduling of threads.

Guarantees: each channel delivers its messages once and in order, and a wait ends by its limit, or at once when a rank
aborts or the peer closes and nothing more of it is to come. Relies on: each rank is used from one thread of its own;
what they share is touched only under the lock of `_Hub.changed`.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from threading import Condition

from torch import Tensor

from penstock.errors import PipelineError
from penstock.execute.transport.protocol import (
    Tag,
    Ticket,
    WaitObserver,
    WithDeadline,
    deadline_exceeded,
    missing_ranks,
    peer_lost,
    require_contiguous,
)
from penstock.execute.transport.rank_names import RankNames
from penstock.running_time import LONGEST_PART_S, running_s, wait_in_parts

Delay = Callable[[int, int], float]
PATIENCE_S = 0.05
"""With an order seed, messages move on after so long although a rank neither waits nor ends: it may be gone."""


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

    @property
    def is_ready(self) -> bool:
        """Whether a message can move now."""
        return bool(self.sends and self.receives) and self.sends[0].ready_s <= time.monotonic()

    def deliver_one(self) -> None:
        _move(self.sends.popleft(), self.receives.popleft())

    def deliver(self) -> bool:
        """Move what can move now, in order; tell whether anything did."""
        has_moved = False
        while self.is_ready:
            self.deliver_one()
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

    def __init__(self, names: RankNames, delay_s: Delay, order_seed: int | None) -> None:
        self.names = names
        self.num_ranks = len(names.numbers)
        self.delay_s = delay_s
        self.order_seed = order_seed
        self._random = Random(order_seed)
        self.waiting: dict[int, _Message] = {}
        """By rank, what it waits for."""
        self.changed = Condition()
        self.channels: dict[tuple[int, int, Tag], _Channel] = {}
        self.aborted_by: int | None = None
        self.closed: set[int] = set()
        self.recovering: set[int] = set()
        self.gave_up_s: dict[int, float] = {}
        """Per rank, `time.monotonic()` at which it last gave up to wait for a fresh start."""
        self.generation = 0

    def channel(self, source: int, destination: int, tag: Tag) -> _Channel:
        return self.channels.setdefault((source, destination, tag), _Channel())

    def deliver(self, channel: _Channel) -> None:
        """Move what can move now: of this channel or, where the order is drawn, of any, once all ranks wait."""
        has_moved = channel.deliver() if self.order_seed is None else self._deliver_drawn()
        if has_moved:
            self.changed.notify_all()

    def _deliver_drawn(self) -> bool:
        has_moved = False
        while len({*self.waiting, *self.closed, *self.recovering}) == self.num_ranks and self.deliver_one():
            has_moved = True
        return has_moved

    def deliver_one(self) -> bool:
        """Move the first message of a channel that is drawn; tell whether there was one."""
        ready = [key for key in sorted(self.channels) if self.channels[key].is_ready]
        if not ready:
            return False
        self.channels[self._random.choice(ready)].deliver_one()
        self.waiting = {rank: message for rank, message in self.waiting.items() if not message.is_done}
        return True

    def trouble(self, peer: int) -> str:
        """Say why nothing can come from this peer any more, if so."""
        if self.aborted_by is not None:
            return f"{self.names[self.aborted_by]} aborted"
        return f"{self.names[peer]} has closed its transport" if peer in self.closed else ""

    def comes_later(self, channel: _Channel) -> bool:
        """Whether a message of a rank that has closed is still to be drawn."""
        return self.order_seed is not None and self.aborted_by is None and channel.is_ready

    def missing_since(self, begin_s: float) -> list[int]:
        """Ranks that do not wait for a fresh start; not those whose wait ended just before, if there are others."""
        missing = set(range(self.num_ranks)) - self.recovering
        never_came = {rank for rank in missing if self.gave_up_s.get(rank, 0.0) < begin_s}
        return sorted(never_came or missing)

    def start_afresh(self) -> None:
        self.channels.clear()
        self.waiting.clear()
        self.aborted_by = None
        self.recovering.clear()
        self.generation += 1
        self.changed.notify_all()


class LocalTransport(WithDeadline):
    """One rank of a process; make all of them with `create`."""

    def __init__(self, hub: _Hub, rank: int, deadline_s: float) -> None:
        super().__init__(deadline_s)
        self.rank = rank
        self.num_ranks = hub.num_ranks
        self.names = hub.names
        self._hub = hub
        self._observer: WaitObserver | None = None
        self._open: dict[int, tuple[_Channel, _Message]] = {}
        self._next_serial = 0
        self._first_serial = 0

    @classmethod
    def create(
        cls,
        num_ranks: int,
        deadline_s: float = 60.0,
        *,
        delay_s: Delay | None = None,
        order_seed: int | None = None,
        names: RankNames | None = None,
    ) -> "list[LocalTransport]":
        """Connect `num_ranks` ranks; use each from one thread of its own.

        `delay_s(source, destination)` gives the seconds that a data message needs on that channel, to play a slow wire.
        With an `order_seed` messages of different channels arrive in an order drawn from it, which errors name.
        """
        names = names or RankNames.plain(num_ranks)
        hub = _Hub(names, delay_s or (lambda source, destination: 0.0), order_seed)
        return [cls(hub, rank, deadline_s) for rank in range(num_ranks)]

    def post_send(self, peer: int, tensor: Tensor, tag: Tag = Tag.DATA) -> Ticket:
        return self._post(tag, Ticket(peer, True, self._next_serial), tensor)

    def post_receive(self, peer: int, tensor: Tensor, tag: Tag = Tag.DATA) -> Ticket:
        ticket = Ticket(peer, False, self._next_serial)
        require_contiguous(self.rank, ticket, tensor)
        return self._post(tag, ticket, tensor)

    def wait(self, ticket: Ticket, limit_s: float | None = None) -> None:
        begin_s = running_s()
        if ticket.serial < self._first_serial:
            raise peer_lost(self.names, self.rank, ticket, 0.0, "recover() forgot this message")
        if ticket.serial not in self._open:
            return
        channel, message = self._open[ticket.serial]
        if self._observer is not None:
            self._observer.note_wait(ticket.peer)
        with self._hub.changed:
            try:
                self._wait_moved(ticket, channel, message, begin_s, self.deadline_s if limit_s is None else limit_s)
            except PipelineError as error:
                if self._hub.order_seed is not None:
                    error.add_note(f"messages moved in the order of order_seed={self._hub.order_seed}")
                raise
            finally:
                self._hub.waiting.pop(self.rank, None)
        del self._open[ticket.serial]
        if self._observer is not None:
            self._observer.note_run()
        if message.problem:
            raise PipelineError(
                f"{self.names[self.rank]}: message of {self.names[ticket.peer]}: {message.problem}",
                rank=self.names.numbers[self.rank],
            )

    def watch(self, observer: WaitObserver) -> None:
        self._observer = observer

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
                hub.start_afresh()  # the last rank to come does it for all; the others see the new generation
            wait_in_parts(partial(hub.changed.wait_for, lambda: hub.generation > generation), self.deadline_s)
            if hub.generation == generation:
                missing = hub.missing_since(begin_s)
                hub.recovering.discard(self.rank)
                hub.gave_up_s[self.rank] = time.monotonic()
                raise missing_ranks(self.names, self.rank, missing, time.monotonic() - begin_s)

    def close(self) -> None:
        with self._hub.changed:
            self._hub.closed.add(self.rank)
            self._open.clear()
            self._hub.changed.notify_all()

    def _post(self, tag: Tag, ticket: Ticket, tensor: Tensor) -> Ticket:
        hub = self._hub
        with hub.changed:
            if trouble := hub.trouble(ticket.peer):
                raise peer_lost(self.names, self.rank, ticket, 0.0, trouble)
            source, destination = (self.rank, ticket.peer) if ticket.is_send else (ticket.peer, self.rank)
            delay_s = hub.delay_s(source, destination) if ticket.is_send and tag is Tag.DATA else 0.0
            channel = hub.channel(source, destination, tag)
            message = _Message(tensor.detach(), time.monotonic() + delay_s)
            (channel.sends if ticket.is_send else channel.receives).append(message)
            self._open[ticket.serial] = (channel, message)
            self._next_serial += 1
            hub.deliver(channel)
            if delay_s > 0:  # a rank that waits for a slow message must learn when it comes
                hub.changed.notify_all()
        return ticket

    def _wait_moved(self, ticket: Ticket, channel: _Channel, message: _Message, begin_s: float, limit_s: float) -> None:
        hub, end_s = self._hub, begin_s + limit_s
        while not message.is_done:
            hub.waiting[self.rank] = message
            hub.deliver(channel)
            now_s = running_s()
            if message.is_done:
                return
            # In a drawn order, what a rank posted before it closed may still be to come.
            if (trouble := hub.trouble(ticket.peer)) and not hub.comes_later(channel):
                raise peer_lost(self.names, self.rank, ticket, now_s - begin_s, trouble)
            if now_s >= end_s:
                raise deadline_exceeded(self.names, self.rank, ticket, now_s - begin_s, self.deadline_s)
            patience_s = PATIENCE_S
            if hub.order_seed is None:
                patience_s = min(channel.next_ready_s() - time.monotonic(), LONGEST_PART_S)
            was_told = wait_in_parts(hub.changed.wait, min(end_s - now_s, patience_s))
            # Nothing has changed for a while: a rank that neither waits nor ends must not hold up a drawn order.
            if not was_told and hub.order_seed is not None and hub.deliver_one():
                hub.changed.notify_all()
