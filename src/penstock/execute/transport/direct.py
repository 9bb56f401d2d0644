"""Sockets straight between ranks of one host, which carry small messages without gloo.

For every message gloo writes three times and wakes a thread of its own on both ends, which for a small message costs
ten times what the kernel takes to hand it over. Here the sender writes once and the receiver reads once. A message is
small by its size alone, which both ends know, so both look for it in the same place; each kind keeps its own order.

Ranks that cannot reach each other's socket files, such as those of other hosts, stay with gloo for everything.
"""

import ctypes
import secrets
import select
import socket
import struct
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread
from typing import Any, cast

from torch import Tensor

MOST_BYTES = 65536
"""Of a small message: of larger ones too few would have room at once in what systems give a socket."""
BUFFER_BYTES = 2**20
"""What is asked of the system for messages on their way; it may give less."""
MIN_MESSAGES_UNDER_WAY = 3
SEND_FLAGS = int(socket.MSG_DONTWAIT)
RECEIVE_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_TRUNC)
"""The length of a message that is too long is told, too."""
HELLO = struct.Struct("<qq16s")
"""Rank, tag, and a secret that shows who may connect."""
GatherObject = Callable[[object], list[object]]


class SocketClosed(Exception):
    """The peer is gone."""


class SocketLate(Exception):
    """Nothing came, or could leave, in time."""


class SizesDiffer(Exception):
    """The peer sent a message of another size than this rank expects."""


@dataclass(slots=True, eq=False)
class Arriving:
    """A message to be read; those of one socket come in the order of posting."""

    tensor: Tensor
    is_done: bool = False


@dataclass(slots=True, eq=False)
class Leaving:
    """A message for which the system had no room yet."""

    tensor: Tensor
    is_done: bool = False


class DirectSocket:
    """The small messages to and from one peer, for one purpose."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._arriving: deque[Arriving] = deque()
        self._overflow = _Overflow(connection)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def send(self, tensor: Tensor) -> Leaving | None:
        """Send a contiguous tensor without blocking; what is returned, if anything, must be waited for.

        Raises: SocketClosed.
        """
        if not self._overflow.is_empty:
            return self._overflow.add(tensor)
        try:
            self._connection.send(_memory_of(tensor), SEND_FLAGS)
        except BlockingIOError:
            return self._overflow.add(tensor)
        except OSError as error:
            raise SocketClosed(str(error)) from error
        return None

    def wait_sent(self, leaving: Leaving, deadline_s: float) -> None:
        """Block until a message has left. Raises: SocketClosed, SocketLate."""
        self._overflow.wait(leaving, deadline_s)

    def post(self, tensor: Tensor) -> Arriving:
        """Let the next message fill this tensor."""
        arriving = Arriving(tensor)
        self._arriving.append(arriving)
        return arriving

    def has_arrived(self, arriving: Arriving) -> bool:
        """Read what is there, up to this message; tell whether it was there. Raises: SocketClosed, SizesDiffer."""
        waiting = self._arriving
        while not arriving.is_done:
            first = waiting[0].tensor
            try:
                num_bytes = self._connection.recv_into(_memory_of(first), 0, RECEIVE_FLAGS)
            except BlockingIOError:
                return False
            except OSError as error:
                raise SocketClosed(str(error)) from error
            if num_bytes == 0:
                raise SocketClosed("it has closed its socket")
            if num_bytes != first.nbytes:
                raise SizesDiffer(f"it sent {num_bytes} bytes, expected {first.nbytes}")
            waiting.popleft().is_done = True
        return True

    def wait_readable(self, deadline_s: float) -> None:
        """Block until something can be read. Raises: SocketLate."""
        if not self._poll.poll(deadline_s * 1000):
            raise SocketLate

    def close(self) -> None:
        """Close the socket, which wakes whoever waits at either end."""
        with suppress(OSError):  # the peer may have closed it before
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class _Overflow:
    """Sends in order what the system had no room for, from a thread of its own, so that computation never waits."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._queue: deque[Leaving] = deque()
        self._changed = Condition()
        self._problem = ""

    @property
    def is_empty(self) -> bool:
        return not self._queue

    def add(self, tensor: Tensor) -> Leaving:
        leaving = Leaving(tensor)
        with self._changed:
            self._queue.append(leaving)
            if len(self._queue) == 1:
                Thread(target=self._drain, name="penstock: messages that wait for room", daemon=True).start()
        return leaving

    def wait(self, leaving: Leaving, deadline_s: float) -> None:
        with self._changed:
            is_over = self._changed.wait_for(lambda: leaving.is_done or bool(self._problem), deadline_s)
            if leaving.is_done:
                return
            raise SocketClosed(self._problem) if is_over else SocketLate

    def _drain(self) -> None:
        while True:
            try:
                self._connection.send(_memory_of(self._queue[0].tensor))
            except OSError as error:  # the queue stays, so that everything behind this message fails too
                with self._changed:
                    self._problem = str(error)
                    self._changed.notify_all()
                return
            with self._changed:
                self._queue.popleft().is_done = True
                self._changed.notify_all()
                if not self._queue:
                    return


@dataclass(frozen=True, slots=True, eq=False)
class DirectSockets:
    """The sockets of one rank, by peer and tag; a peer that cannot be reached has none."""

    by_peer_and_tag: dict[tuple[int, int], DirectSocket]
    most_bytes: int
    """Of a message that goes this way."""

    def of(self, peer: int, tag: int, num_bytes: int) -> DirectSocket | None:
        """Return the socket for a message, or None where it must go another way."""
        if 0 < num_bytes <= self.most_bytes:
            return self.by_peer_and_tag.get((peer, tag))
        return None

    def close(self) -> None:
        for each in self.by_peer_and_tag.values():
            each.close()


NOT_DIRECT = DirectSockets({}, 0)


def connect_directly(rank: int, tags: tuple[int, ...], all_gather: GatherObject, deadline_s: float) -> DirectSockets:
    """Connect with every rank that can be reached; every rank of the group calls this, and both ends of a pair agree.

    Raises: OSError where a connection breaks while it is made.
    """
    with ExitStack() as stack:
        door = _Door.open(stack)
        doors = [_Door(*row) for row in cast(list[list[Any]], all_gather([door.path, door.secret, door.most_bytes]))]
        made: _Connections = {}
        for peer in range(rank + 1, len(doors)):
            made |= _connect(rank, peer, tags, doors[peer], deadline_s)
        reached = cast(list[list[int]], all_gather(sorted({peer for peer, _ in made})))
        num_coming = len(tags) * sum(rank in theirs for theirs in reached)
        made |= door.accept(num_coming, deadline_s)
    most_bytes = min(each.most_bytes for each in doors)
    return DirectSockets({key: DirectSocket(connection) for key, connection in made.items()}, most_bytes)


@dataclass(frozen=True, slots=True)
class _Door:
    """Where a rank waits for others to connect, as all ranks know it."""

    path: str
    """Empty where there is none."""
    secret: str = ""
    most_bytes: int = MOST_BYTES
    listener: socket.socket | None = None
    """On the rank itself."""

    @classmethod
    def open(cls, stack: ExitStack) -> "_Door":
        """Listen at a path that only this user can reach, until the stack is closed."""
        try:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-")), "door")
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind(str(path))
            listener.listen(socket.SOMAXCONN)
            return cls(str(path), secrets.token_hex(8), _make_room(listener), listener)
        except (AttributeError, OSError):  # a system without such sockets, or no room for the file
            return cls("")

    def accept(self, num_coming: int, deadline_s: float) -> "_Connections":
        """Take the connections of peers, which stand in line already."""
        made: _Connections = {}
        while self.listener is not None and len(made) < num_coming:
            self.listener.settimeout(deadline_s)
            connection, _ = self.listener.accept()
            connection.settimeout(deadline_s)
            greeting = connection.recv(HELLO.size)
            if greeting[-len(self.secret) :] != self.secret.encode():
                connection.close()
                continue
            rank, tag, _ = HELLO.unpack(greeting)
            made[rank, tag] = _made_ready(connection)
        return made


_Connections = dict[tuple[int, int], socket.socket]
"""By peer and tag."""


def _connect(rank: int, peer: int, tags: tuple[int, ...], door: _Door, deadline_s: float) -> _Connections:
    """Connect to a peer for every tag, or not at all."""
    made: _Connections = {}
    if not door.path:
        return made
    try:
        for tag in tags:
            connection = made[peer, tag] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(deadline_s)
            connection.connect(door.path)
            connection.send(HELLO.pack(rank, tag, door.secret.encode()))
            _made_ready(connection)
    except (AttributeError, OSError):  # another host, another user, or another view of the files
        for connection in made.values():
            connection.close()
        return {}
    return made


def _made_ready(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    _make_room(connection)
    return connection


def _make_room(connection: socket.socket) -> int:
    """Ask for room, and return how large a message may be so that several can be under way."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    return min(MOST_BYTES, given // (2 * MIN_MESSAGES_UNDER_WAY))


def _memory_of(tensor: Tensor) -> "ctypes.Array[ctypes.c_char]":
    """The bytes of a contiguous tensor on the CPU, of whichever type; valid as long as the tensor."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
