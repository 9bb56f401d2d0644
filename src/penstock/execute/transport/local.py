"""A transport whose ranks are threads of one process, for tests and notebooks.

As on a socket, a message moves when both ends are posted, the rank that came last moves it, and a send is over once its
receive has been filled. So a program that runs here does not rely on buffering that another transport lacks.

Guarantees: each channel delivers its messages once and in order, and a wait ends by its limit, or at once when a rank
aborts or the peer closes. Relies on: each rank is used from one thread of its own; what they share is touched only
under the lock of `Wires.changed`.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from threading import Condition

from torch import Tensor

from penstock.execute.transport.links import LinkClosed, MessageLate, SizesDiffer
from penstock.execute.transport.over_links import OverLinks
from penstock.execute.transport.protocol import Tag, missing_ranks
from penstock.execute.transport.rank_names import RankNames
from penstock.running_time import LONGEST_PART_S, running_s, wait_in_parts


@dataclass(slots=True, eq=False)
class Message:
    """One posted end of a message."""

    tensor: Tensor
    is_done: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Channel:
    """Messages from one rank to one other whose second end is not posted yet."""

    source: int
    destination: int
    tag: Tag
    sends: deque[Message] = field(default_factory=deque)
    receives: deque[Message] = field(default_factory=deque)

    @property
    def is_ready(self) -> bool:
        """Whether both ends of its next message are posted."""
        return bool(self.sends and self.receives)

    def move(self) -> None:
        """Move the next message."""
        send, receive = self.sends.popleft(), self.receives.popleft()
        source, target = send.tensor, receive.tensor
        if source.shape == target.shape and source.dtype == target.dtype:
            target.copy_(source)
        else:
            problem = (
                f"sent {tuple(source.shape)} {source.dtype}, expected {tuple(target.shape)} {target.dtype}; "
                "both ends must agree on shape and type"
            )
            send.problem = receive.problem = problem
        send.is_done = receive.is_done = True


class Wires:
    """The state that the ranks of one process share; everything in it is guarded by `changed`.

    `deliver`, `wait` and `trouble` decide when messages move. A test may have them move later, or in another order.
    """

    def __init__(self, names: RankNames) -> None:
        self.names = names
        self.num_ranks = len(names.numbers)
        self.changed = Condition()
        self.channels: dict[tuple[int, int, Tag], Channel] = {}
        self.aborted_by: int | None = None
        self.closed: set[int] = set()
        self.recovering: set[int] = set()
        self.gave_up_s: dict[int, float] = {}
        """`time.monotonic()` at which each rank last gave up to wait for a fresh start."""
        self.generation = 0

    def channel(self, source: int, destination: int, tag: Tag) -> Channel:
        key = source, destination, tag
        return self.channels.setdefault(key, Channel(*key))

    def deliver(self, channel: Channel) -> None:
        """Move what can move now, after one end of a message was posted on this channel."""
        while channel.is_ready:
            channel.move()
            self.changed.notify_all()

    def wait(self, rank: int, channel: Channel, message: Message, limit_s: float) -> None:
        """Let a rank wait until something changes, but not for long; it comes again while its message is not done."""
        # This waits for one part alone. A condition does not say that it was notified just as the part ended, before
        # the lock was taken back; another part would then wait for a notification that is over.
        wait_in_parts(self.changed.wait, min(limit_s, LONGEST_PART_S))

    def trouble(self, peer: int, channel: Channel) -> str:
        """Say why nothing can come on a channel of this peer any more, if so."""
        if self.aborted_by is not None:
            return f"{self.names[self.aborted_by]} aborted"
        return f"{self.names[peer]} has closed its transport" if peer in self.closed else ""

    def missing_since(self, begin_s: float) -> list[int]:
        """Return the ranks that do not wait for a fresh start; those that did until just now if no other is missing."""
        missing = set(range(self.num_ranks)) - self.recovering
        never_came = {rank for rank in missing if self.gave_up_s.get(rank, 0.0) < begin_s}
        return sorted(never_came or missing)

    def start_afresh(self) -> None:
        self.channels.clear()
        self.aborted_by = None
        self.recovering.clear()
        self.generation += 1
        self.changed.notify_all()


@dataclass(frozen=True, slots=True, eq=False)
class ThreadLink:
    """The messages of one tag between a rank and one peer."""

    wires: Wires
    rank: int
    peer: int
    tag: Tag

    def send(self, tensor: Tensor) -> "PostedMessage":
        return self._post(tensor, is_send=True)

    def receive(self, tensor: Tensor) -> "PostedMessage":
        return self._post(tensor, is_send=False)

    def _post(self, tensor: Tensor, *, is_send: bool) -> "PostedMessage":
        wires, message = self.wires, Message(tensor.detach())
        source, destination = (self.rank, self.peer) if is_send else (self.peer, self.rank)
        with wires.changed:
            channel = wires.channel(source, destination, self.tag)
            if trouble := wires.trouble(self.peer, channel):
                raise LinkClosed(trouble)
            (channel.sends if is_send else channel.receives).append(message)
            wires.deliver(channel)
        return PostedMessage(self, channel, message)


@dataclass(frozen=True, slots=True, eq=False)
class PostedMessage:
    """A message for the rank that has posted one end of it; no channel leads back to it, so no cycle holds tensors."""

    link: ThreadLink
    channel: Channel
    message: Message

    def is_over(self) -> bool:
        return False  # so that observers are told of the wait for it, however short

    def wait(self, deadline_s: float) -> None:
        wires, message, end_s = self.link.wires, self.message, running_s() + deadline_s
        with wires.changed:
            while not message.is_done:
                remaining_s = end_s - running_s()
                if trouble := wires.trouble(self.link.peer, self.channel):
                    raise LinkClosed(trouble)
                if remaining_s <= 0:
                    raise MessageLate
                wires.wait(self.link.rank, self.channel, message, remaining_s)
        if message.problem:
            raise SizesDiffer(message.problem)


class LocalTransport(OverLinks):
    """One rank of a process; make all of them with `create`."""

    forgotten_by = "recover()"

    def __init__(self, wires: Wires, rank: int, deadline_s: float) -> None:
        super().__init__(rank, wires.names, deadline_s)
        self._wires = wires
        for peer, tag in product(range(self.num_ranks), Tag):
            self._links[peer, tag] = ThreadLink(wires, rank, peer, tag)

    @classmethod
    def create(
        cls, num_ranks: int, deadline_s: float = 60.0, *, names: RankNames | None = None
    ) -> "list[LocalTransport]":
        """Connect `num_ranks` ranks; use each from one thread of its own."""
        wires = Wires(names or RankNames.plain(num_ranks))
        return [cls(wires, rank, deadline_s) for rank in range(num_ranks)]

    def abort(self) -> None:
        with self._wires.changed:
            self._wires.aborted_by = self.rank
            self._wires.changed.notify_all()

    def recover(self) -> None:
        self._first_serial = self._next_serial
        self._open.clear()
        begin_s = time.monotonic()
        wires = self._wires
        with wires.changed:
            generation = wires.generation
            wires.recovering.add(self.rank)
            if len(wires.recovering) == self.num_ranks:
                wires.start_afresh()  # the last rank to come does it for all; the others see the new generation
            # A rank that has closed its transport never comes.
            is_over = partial(wires.changed.wait_for, lambda: wires.generation > generation or wires.closed)
            wait_in_parts(is_over, self.deadline_s)
            if wires.generation == generation:
                missing = wires.missing_since(begin_s)
                wires.recovering.discard(self.rank)
                wires.gave_up_s[self.rank] = time.monotonic()
                raise missing_ranks(self.names, self.rank, missing, time.monotonic() - begin_s)

    def close(self) -> None:
        with self._wires.changed:
            self._wires.closed.add(self.rank)
            self._open.clear()
            self._wires.changed.notify_all()

    def _raise_own_error(self, error: RuntimeError) -> None:
        if not isinstance(error, LinkClosed | MessageLate):
            raise error  # it came up in this thread, as it copied a message
