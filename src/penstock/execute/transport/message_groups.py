"""`MessageGroups`: messages between devices that one communicator launches together, as groups.

    begin   post send to 2   post receive from 2   post receive from 0   end
            kept             kept                  kept                  launched, as one work

A communicator of NCCL runs what it is given in order, and a send ends when its receive has begun at the other end. So
two communicators carry messages that are posted one by one, one for each direction. The messages of a group all begin
at once, in both directions, and one communicator is enough.

Guarantees: a message that is posted outside of a group is a group by itself; an abort leaves no group open. Relies on:
all ranks launch their groups in an order that the proof `coalesced` has found to end.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from penstock.execute.transport.backend_links import QueuedMessage
from penstock.execute.transport.device_queue import DeviceQueue
from penstock.execute.transport.protocol import Tag, Ticket
from penstock.execute.undocumented_backends import Backend, begin_coalescing, end_coalescing, end_group


@dataclass(slots=True, eq=False)
class MessageGroups:
    """The groups of one rank on one backend, one after another."""

    backend: Backend
    _messages: list[QueuedMessage] = field(default_factory=list)
    """The messages of the open group."""
    _is_open: bool = False

    def begin(self) -> None:
        """Open a group. Raises: RuntimeError."""
        begin_coalescing(self.backend)
        self._is_open = True

    def end(self) -> None:
        """Launch the open group. Raises: RuntimeError."""
        messages, self._messages, self._is_open = self._messages, [], False
        work = end_coalescing(self.backend)
        for message in messages:
            message.work = work

    def post(self, message: QueuedMessage, peer: int, *, is_send: bool) -> QueuedMessage:
        """Post a message into the open group, or as a group by itself. Raises: RuntimeError."""
        is_alone = not self._is_open
        if is_alone:
            self.begin()
        call = self.backend.send if is_send else self.backend.recv
        try:
            call([message.tensor], peer, Tag.DATA)
        except RuntimeError:
            self.give_up()
            raise
        self._messages.append(message)
        if is_alone:
            self.end()
        return message

    def give_up(self) -> None:
        """Close a group that an error has left open, before its backend is aborted."""
        if self._is_open:
            self._messages, self._is_open = [], False
            end_group(self.backend)


@dataclass(frozen=True, slots=True, eq=False)
class GroupedLink:
    """The messages to and from one peer, within the groups of this rank."""

    peer: int
    groups: MessageGroups
    is_held_up: Callable[[], bool]

    def send(self, tensor: Tensor) -> QueuedMessage:
        return self.groups.post(QueuedMessage(None, tensor.detach(), self.is_held_up), self.peer, is_send=True)

    def receive(self, tensor: Tensor) -> QueuedMessage:
        return self.groups.post(QueuedMessage(None, tensor.detach(), self.is_held_up), self.peer, is_send=False)


@dataclass(slots=True, eq=False)
class Turns:
    """Lets messages of one rank and its computations take turns: the current stream waits at once for each launch.

    Two ranks that both waited for a send would never come to their receives, so messages go in groups. Those are proved
    to end one after another on a communicator, where no later message begins before a group has ended. So a rank that
    waits for a group holds up its own computations alone, on which its peers depend through such messages only.
    """

    _queue: DeviceQueue | None
    """Notices a peer that is late; None along the replicas, where the host waits for what it has launched."""
    _messages: list[tuple[Ticket, QueuedMessage]] = field(default_factory=list)
    """The messages of the open group."""

    def take(self, ticket: Ticket, message: QueuedMessage) -> None:
        """Let the current stream wait for a message, or for the group that it is launched with. Raises: PeerLost."""
        if message.work is None:
            self._messages.append((ticket, message))
        elif self._queue is None:
            message.follow()
        else:
            self._queue.follow(ticket, message)

    def end_group(self) -> None:
        """Let the current stream wait for the group that was launched. Raises: PeerLost."""
        messages, self._messages = self._messages, []
        # A group has one work, which ends as a whole; where it is late, a peer that sends to this rank is named first.
        for ticket, message in sorted(messages, key=lambda posted: posted[0].is_send)[:1]:
            self.take(ticket, message)

    def forget(self) -> None:
        """Forget the open group."""
        self._messages.clear()
