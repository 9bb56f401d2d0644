"""How ranks of one host find each other and connect, for messages that go past gloo.

Every rank opens a door, a socket file in a folder that only its user may enter, and tells all others its path and a
secret. Of a pair the lower rank connects. Ranks that cannot reach each other's files, such as those of other hosts,
stay with gloo for everything.
"""

import os
import secrets
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from penstock.execute.transport import shared_memory
from penstock.execute.transport.direct import DirectSocket
from penstock.execute.transport.shared_memory import SharedMemory

MOST_PACKET_BYTES = 65536
"""Of a small message: of larger ones too few would have room at once in what systems give a socket."""
BUFFER_BYTES = 2**20
"""What is asked of the system for messages on their way; it may give less."""
MIN_MESSAGES_UNDER_WAY = 3
HELLO = struct.Struct("<qq?16s")
"""Rank, tag, whether messages go through memory, and a secret that shows who may connect."""
GatherObject = Callable[[object], list[object]]


class Way(NamedTuple):
    """One of the sockets of a rank."""

    peer: int
    tag: int
    is_shared: bool
    """Whether messages go through memory that both ends see."""


@dataclass(frozen=True, slots=True, eq=False)
class DirectSockets:
    """The sockets of one rank; to a peer that cannot be reached there is none."""

    by_way: dict[Way, DirectSocket]
    most_packet_bytes: int
    """Of a message that goes as a packet; larger ones go through memory."""

    def of(self, peer: int, tag: int, num_bytes: int) -> DirectSocket | None:
        """Return the socket for a message, or None where it must go another way."""
        if 0 < num_bytes <= self.most_packet_bytes:
            return self.by_way.get(Way(peer, tag, False))
        if 0 < num_bytes <= shared_memory.MOST_BYTES:
            return self.by_way.get(Way(peer, tag, True))
        return None

    def close(self) -> None:
        for each in self.by_way.values():
            each.close()


NOT_DIRECT = DirectSockets({}, 0)


def connect_directly(rank: int, tags: tuple[int, ...], all_gather: GatherObject, deadline_s: float) -> DirectSockets:
    """Connect with every rank that can be reached; every rank of the group calls this, and both ends of a pair agree.

    Raises: OSError where a connection breaks while it is made.
    """
    with ExitStack() as stack:
        door = _Door.open(stack)
        doors = [_Door(*row) for row in cast(list[list[Any]], all_gather([door.path, door.secret, door.most_bytes]))]
        made: dict[Way, DirectSocket] = {}
        for peer in range(rank + 1, len(doors)):
            made.update(_connect(rank, peer, tags, doors[peer], deadline_s))
        reached = cast(list[list[list[Any]]], all_gather([list(way) for way in made]))
        ways = [Way(peer, *way[1:]) for peer, theirs in enumerate(reached) for way in theirs if way[0] == rank]
        made |= door.accept(ways, deadline_s)
    return DirectSockets(made, min(each.most_bytes for each in doors))


@dataclass(frozen=True, slots=True)
class _Door:
    """Where a rank waits for others to connect, as all ranks know it."""

    path: str
    """Empty where there is none."""
    secret: str = ""
    most_bytes: int = MOST_PACKET_BYTES
    """Of a packet."""
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

    def accept(self, ways: list[Way], deadline_s: float) -> dict[Way, DirectSocket]:
        """Take these connections of peers, which stand in line already, and no others."""
        made: dict[Way, DirectSocket] = {}
        while self.listener is not None and len(made) < len(ways):
            self.listener.settimeout(deadline_s)
            connection, _ = self.listener.accept()
            connection.settimeout(deadline_s)
            greeting, files, _, _ = socket.recv_fds(connection, HELLO.size, 1)
            way = self._who_comes(greeting)
            if way in ways:
                made[way] = _made_ready(connection, files, is_maker=False)
            else:
                connection.close()
            for file in files:
                os.close(file)
        return made

    def _who_comes(self, greeting: bytes) -> Way | None:
        if len(greeting) != HELLO.size or greeting[-len(self.secret) :] != self.secret.encode():
            return None
        return Way(*HELLO.unpack(greeting)[:3])


def _connect(
    rank: int, peer: int, tags: tuple[int, ...], door: _Door, deadline_s: float
) -> Iterator[tuple[Way, DirectSocket]]:
    """Connect to a peer, by every way that the system offers."""
    if door.path:
        for is_shared in (False, True):
            yield from _connect_for_all(rank, [Way(peer, tag, is_shared) for tag in tags], door, deadline_s).items()


def _connect_for_all(rank: int, ways: list[Way], door: _Door, deadline_s: float) -> dict[Way, DirectSocket]:
    """Connect by all of these ways, or by none."""
    made: dict[Way, DirectSocket] = {}
    with ExitStack() as on_failure:
        try:
            for way in ways:
                made[way] = _knock(rank, way, door, deadline_s)
                on_failure.callback(made[way].close)
        except (AttributeError, OSError):  # another host, another user, another view of the files, no such memory
            return {}
        on_failure.pop_all()
    return made


def _knock(rank: int, way: Way, door: _Door, deadline_s: float) -> DirectSocket:
    """Connect to a door and say who comes, with the memory that is to be shared."""
    with ExitStack() as files, ExitStack() as on_failure:
        handed = [shared_memory.make_memory()] if way.is_shared else []
        for file in handed:
            files.callback(os.close, file)
        connection = on_failure.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        connection.settimeout(deadline_s)
        connection.connect(door.path)
        socket.send_fds(connection, [HELLO.pack(rank, way.tag, way.is_shared, door.secret.encode())], handed)
        made = _made_ready(connection, handed, is_maker=True)
        on_failure.pop_all()
    return made


def _made_ready(connection: socket.socket, files: list[int], *, is_maker: bool) -> DirectSocket:
    connection.settimeout(None)
    _make_room(connection)
    carrier = SharedMemory(connection, files[0], is_maker=is_maker) if files else None
    return DirectSocket(connection, carrier)


def _make_room(connection: socket.socket) -> int:
    """Ask for room, and return how large a packet may be so that several can be under way."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    return min(MOST_PACKET_BYTES, given // (2 * MIN_MESSAGES_UNDER_WAY))
