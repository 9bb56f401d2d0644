"""Receives that a device waits for by itself, and the host's own waits for the device.

    host     follow R0  queue F0  follow R1  queue F1 ...
    device   ...        waits for R0  F0  waits for R1  F1 ...

Guarantees: a host that waits for its device (`await_device`) learns in time that the device waits for a peer that is
late or lost; for a host that is blocked by its device, another thread can look. The time against that peer begins when
the device has come to the receive, not when the host queued it. Relies on: torch lets the current stream wait for a
message and the host go on.
"""

from collections import deque
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from penstock.errors import DeadlineExceeded, PeerLost
from penstock.execute.transport.backend_links import QueuedMessage
from penstock.execute.transport.links import Pending, never
from penstock.execute.transport.protocol import (
    Messages,
    Ticket,
    Transport,
    WaitObserver,
    deadline_exceeded,
    peer_lost,
)
from penstock.execute.transport.rank_names import rank_names
from penstock.running_time import pause, running_s

PAUSE_S = 50e-6
WaitForDevice = Callable[[Callable[[], bool]], None]
"""Lets the host wait until its device has come somewhere, as `await_device` does."""


@dataclass(frozen=True, slots=True, eq=False)
class _FollowedReceive:
    """A receive, or with one stream any message, that the device waits for once it has come there."""

    ticket: Ticket
    message: QueuedMessage
    marker: torch.Event
    row: int
    """Index of the instruction that needs the message."""


@dataclass(eq=False)
class DeviceQueue:
    """The receives of one rank that its device waits for, in the order in which it comes to them."""

    _transport: Transport
    _posted: MutableMapping[int, Pending]
    """The transport's messages by serial, until somebody waits for them."""
    _make_marker: Callable[[], torch.Event]
    read_clock: Callable[[], float] = running_s
    _receives: deque[_FollowedReceive] = field(default_factory=deque)
    _held_up_since_s: float | None = None
    _is_wait_noted: bool = False
    """Whether the observer has been told that the device waits, and not yet that the rank goes on."""
    _blocking_receive: tuple[_FollowedReceive, float] | None = None
    """The receive that held the device up when another thread looked, and the time of its first look."""
    _observer: WaitObserver | None = None
    missed_row: int | None = None
    """Index of the instruction whose message the device waited for in vain; None where it did not."""

    def __post_init__(self) -> None:
        self._names = rank_names(self._transport)

    def watch(self, observer: WaitObserver) -> None:
        """Tell the observer for whom the device waits from now on."""
        self._observer = observer

    def follow(self, ticket: Ticket, message: QueuedMessage | None = None) -> None:
        """Let all later work of the current stream wait for a receive, and the host go on. Raises: PeerLost.

        With its `message`, somebody may wait for the ticket once more, as for that of a send.
        """
        if message is None:
            posted = self._posted.get(ticket.serial)
            if not isinstance(posted, QueuedMessage):
                return self._transport.wait(ticket)
            message = posted
            del self._posted[ticket.serial]
        marker = self._make_marker()
        marker.record()
        try:
            message.follow()
        except RuntimeError as error:
            self.require_device()
            raise peer_lost(self._names, self._transport.rank, ticket, 0.0, str(error)) from error.with_traceback(None)
        row = -1 if self._observer is None else self._observer.row
        self._receives.append(_FollowedReceive(ticket, message, marker, row))

    def has_left(self, ticket: Ticket) -> bool:
        """Look, without blocking, whether a wait for this send would return at once."""
        message = self._posted.get(ticket.serial)
        return not isinstance(message, QueuedMessage) or message.has_ended()

    def is_held_up(self) -> bool:
        """Look whether the device waits for a peer now. Raises: PeerLost, DeadlineExceeded."""
        error = self._given_up_by_peer(self._waited_s())
        if error is not None:
            self.missed_row = self._receives[0].row if self._receives else None
            raise error
        while self._receives and self._has_arrived(self._receives[0]):
            self._receives.popleft()
            self.go_on()
            self._held_up_since_s = None
        if not self._receives or not self._receives[0].marker.query():
            return False
        receive = self._receives[0]
        ticket = receive.ticket
        if self._held_up_since_s is None:
            self._held_up_since_s = self.read_clock()
        if not self._is_wait_noted and self._observer is not None:
            self._is_wait_noted = True
            self._observer.note_wait(self._names.numbers[ticket.peer], receive.row)
        waited_s, deadline_s = self._waited_s(), self._transport.deadline_s
        if waited_s >= deadline_s:
            self.missed_row = receive.row
            raise deadline_exceeded(self._names, self._transport.rank, ticket, waited_s, deadline_s)
        return True

    def go_on(self) -> None:
        """Say that the host goes on, if it was said to wait: its device has come far enough, or to the next receive.

        Else a rank whose layer takes long would look as if it waited for a peer, and nobody could name it.
        """
        if self._is_wait_noted and self._observer is not None:
            self._observer.note_run()
        self._is_wait_noted = False

    def why_held_up(self) -> PeerLost | DeadlineExceeded | None:
        """Return why the device waits in vain, if it does: its peer has given up, or is late. For any thread to call.

        A host that is blocked by its device, as by a copy to the host, cannot look by itself.
        """
        try:
            receive = next((receive for receive in self._receives if not receive.message.has_ended()), None)
        except RuntimeError:  # the host has followed or forgotten one meanwhile, so it is not blocked
            receive = None
        if receive is None or not receive.marker.query():
            self._blocking_receive = None
            return None
        if self._blocking_receive is None or self._blocking_receive[0] is not receive:
            self._blocking_receive = receive, self.read_clock()
        waited_s, deadline_s = self.read_clock() - self._blocking_receive[1], self._transport.deadline_s
        if waited_s >= deadline_s:
            self.missed_row = receive.row
            return deadline_exceeded(self._names, self._transport.rank, receive.ticket, waited_s, deadline_s)
        error = self._given_up_by_peer(waited_s)
        if error is not None:
            self.missed_row = receive.row
        return error

    def _given_up_by_peer(self, waited_s: float) -> PeerLost | None:
        """Notice a peer that has given up the step: to abort a communicator wakes nobody at its other end."""
        peer = None if self._observer is None else self._observer.gave_up()
        if peer is None:
            return None
        rank_name = self._names[self._transport.rank]
        text = f"{rank_name}: {self._names.of_number(peer)} has given up the step. Look at its output for the cause"
        return PeerLost(text, rank=peer, peer=peer, waited_s=waited_s)

    def require_device(self) -> None:
        """Raise what this rank's own device has failed with, if it has: then every look at a message raises it too.

        Raises:
            RuntimeError: a kernel has failed, say.
        """
        marker = self._make_marker()
        marker.record()
        marker.query()

    def held_tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors of followed receives, and of all messages that nobody has waited for."""
        posted_messages = [message for message in self._posted.values() if isinstance(message, QueuedMessage)]
        return [receive.message.tensor for receive in self._receives], [message.tensor for message in posted_messages]

    def settle(self) -> None:
        """Let the host wait until all followed receives are there. Raises: PeerLost, DeadlineExceeded."""
        rank, deadline_s = self._transport.rank, self._transport.deadline_s
        await_device(
            lambda: not self._receives,
            rank=rank,
            deadline_s=deadline_s,
            is_held_up=self.is_held_up,
            go_on=self.go_on,
        )

    def forget(self) -> None:
        """Forget all receives."""
        self._receives.clear()
        self._held_up_since_s = self._blocking_receive = self.missed_row = None
        self._is_wait_noted = False

    def _has_arrived(self, receive: _FollowedReceive) -> bool:
        try:
            return receive.message.is_over()
        except RuntimeError as error:
            reason = str(error)
        self.require_device()
        self.missed_row = receive.row
        # Frames live as long as the error, and a work kept alive would keep the connections open.
        raise peer_lost(self._names, self._transport.rank, receive.ticket, self._waited_s(), reason)

    def _waited_s(self) -> float:
        return 0.0 if self._held_up_since_s is None else self.read_clock() - self._held_up_since_s


def device_queue_of(transport: Messages) -> DeviceQueue | None:
    """Return the queue that a transport's messages are in; None where its receives are for the host to wait for."""
    queue = getattr(transport, "device_queue", None)
    return queue if isinstance(queue, DeviceQueue) else None


def held_up_of(transport: Messages) -> Callable[[], bool]:
    """Return what looks whether a peer holds up the device of a transport, for `await_device`."""
    queue = device_queue_of(transport)
    return never if queue is None else queue.is_held_up


def waiting_of(transport: Transport, *, has_peers: bool = True) -> WaitForDevice:
    """Return `await_device` as the host of a transport calls it; unless it `has_peers`, none can hold its device up."""
    wait = partial(await_device, rank=transport.rank, deadline_s=transport.deadline_s)
    queue = device_queue_of(transport) if has_peers else None
    return wait if queue is None else partial(wait, is_held_up=queue.is_held_up, go_on=queue.go_on)


def await_device(
    is_reached: Callable[[], bool],
    *,
    rank: int,
    deadline_s: float,
    is_held_up: Callable[[], bool] = never,
    go_on: Callable[[], object] = never,
    read_clock: Callable[[], float] = running_s,
    pause: Callable[[float], None] = pause,
) -> None:
    """Let the host wait until its device has come to some point of its queue, such as an event: until `is_reached()`.

    `is_held_up` returns whether the device itself waits for a message of a peer; a wait for a message has a deadline of
    its own, so that time does not count here. `go_on` is called at the end. `pause` sleeps for some seconds.

    Raises:
        DeadlineExceeded: the device has computed for more than `deadline_s` seconds without coming there.
        Exception: what `is_held_up` raises, such as `PeerLost`.
    """
    begin_s = read_clock()
    while not is_reached():
        if is_held_up():
            begin_s = read_clock()  # the time starts again
        waited_s = read_clock() - begin_s
        if waited_s > deadline_s:
            raise DeadlineExceeded(
                f"rank {rank}: waited {waited_s:.2f} s for its device to end a computation, the deadline is "
                f"{deadline_s:g} s. Find out what the device waits for, or allow more time",
                rank=rank,
                waited_s=waited_s,
            )
        pause(PAUSE_S)
    go_on()
