"""How the ranks of a group find each other: rounds in their store, then sockets straight between ranks of one host.

    store       each rank enters a round and writes down where it listens; all wait for all
    sockets     of a pair, the lower rank connects to the listener of the higher one
    store       each rank writes down which sockets it has connected; the others accept exactly these

A listener is a socket file in a folder that only its user may enter; who connects shows a secret. Ranks that cannot
reach each other's files, such as those of other hosts, stay with gloo for everything.
"""

import json
import os
import secrets
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.errors import PeerLost
from penstock.execute.transport import shared_memory
from penstock.execute.transport.protocol import missing_ranks
from penstock.execute.transport.shared_memory import SharedMemory
from penstock.execute.transport.sockets import DirectSocket

MAX_PACKET_BYTES = 65536
"""Of a small message: of larger ones too few would have room at once in what systems give a socket."""
BUFFER_BYTES = 2**20
"""What is asked of the system for messages on their way; it may give less."""
MIN_MESSAGES_IN_FLIGHT = 3
HELLO = struct.Struct("<qq?16s")
"""Rank, tag, whether messages go through memory, and the listener's secret."""
GAVE_UP = "gave up"
Exchange = Callable[[str, str], list[str]]
"""(name, own text) -> the texts that all ranks gave under this name."""


class Rendezvous:
    """The rounds in which one group of ranks meets in its store, as one rank sees them.

    Keys of an earlier connection would lead to closed ports, so each connection has a round of its own. A rank that
    gives up a round raises `min_round`, and whoever comes late skips it: a rank that missed rounds, because it failed
    before it came to them, meets the others again in the next one. The count is in the store, so a second object over
    the same store goes on where the first one was.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int) -> None:
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._round = -1

    def enter(self) -> Store:
        """Begin a round; return a store that is empty and the same for all ranks that come to it."""
        counter = f"rounds/{self._rank}"
        entered = self._store.add(counter, 0)
        self._round = max(entered, self._store.add("min_round", 0))
        self._store.add(counter, self._round + 1 - entered)
        return PrefixStore(f"{self._round}", self._store)

    def exchange(self, name: str, own: str, deadline_s: float) -> list[str]:
        """Wait until all ranks have given a text under this name in this round; return all of them.

        Raises: DeadlineExceeded, naming the ranks that did not come; PeerLost where one gave up.
        """
        begin_s = time.monotonic()
        keys = [f"{self._round}/{name}/{rank}" for rank in range(self._num_ranks)]
        self._store.set(keys[self._rank], own)
        try:
            self._store.wait(keys, timedelta(seconds=deadline_s))
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            self.give_up()
            raise missing_ranks(self._rank, missing, time.monotonic() - begin_s) from error
        texts = [text.decode() for text in self._store.multi_get(keys)]
        if GAVE_UP in texts:
            lost = texts.index(GAVE_UP)
            raise PeerLost(f"rank {lost} could not connect; look at its output", rank=lost, peer=lost)
        return texts

    def give_up(self, *names: str) -> None:
        """Make every rank skip this round, because this rank has left it, and tell those that wait for these names."""
        for name in names:
            self._store.set(f"{self._round}/{name}/{self._rank}", GAVE_UP)
        min_round = self._store.add("min_round", 0)
        if min_round <= self._round:
            self._store.add("min_round", self._round + 1 - min_round)


class SocketKey(NamedTuple):
    """One of the sockets of a rank."""

    peer: int
    tag: int
    is_shared: bool
    """Whether messages go through memory that both ends see."""


@dataclass(frozen=True, slots=True, eq=False)
class DirectSockets:
    """The sockets of one rank; to a peer that cannot be reached there is none."""

    by_key: dict[SocketKey, DirectSocket]
    max_packet_bytes: int
    """Of a message that goes as a packet; larger ones go through memory."""

    def of(self, peer: int, tag: int, num_bytes: int) -> DirectSocket | None:
        """Return the socket for a message, or None where it must go another way."""
        if 0 < num_bytes <= self.max_packet_bytes:
            return self.by_key.get(SocketKey(peer, tag, False))
        if 0 < num_bytes <= shared_memory.MAX_MESSAGE_BYTES:
            return self.by_key.get(SocketKey(peer, tag, True))
        return None

    def close(self) -> None:
        for each in self.by_key.values():
            each.close()


NO_SOCKETS = DirectSockets({}, 0)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a rank listens, as all ranks know it."""

    path: str = ""
    """Empty where it does not."""
    secret: str = ""
    max_packet_bytes: int = MAX_PACKET_BYTES


class Listener:
    """Where the sockets of one rank are connected, until the stack is closed."""

    def __init__(self, stack: ExitStack, *, is_wanted: bool = True) -> None:
        """Listen at a path that only this user can reach, if that is wanted and the system lets us."""
        self.address = Address()
        if not is_wanted:
            return
        try:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-")), "listener")
            self._socket = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            self._socket.bind(str(path))
            self._socket.listen(socket.SOMAXCONN)
            self.address = Address(str(path), secrets.token_hex(8), _make_room(self._socket))
        except (AttributeError, OSError):  # a system without such sockets, or no room for the file
            pass

    def address_text(self) -> str:
        """Return what the other ranks need to connect (`connect_all`)."""
        return json.dumps(asdict(self.address))

    def accept(self, expected: Sequence[SocketKey], deadline_s: float) -> dict[SocketKey, DirectSocket]:
        """Take these connections of peers, which stand in line already, and no others."""
        made: dict[SocketKey, DirectSocket] = {}
        while len(made) < len(expected):
            self._socket.settimeout(deadline_s)
            connection, _ = self._socket.accept()
            connection.settimeout(deadline_s)
            greeting, files, _, _ = socket.recv_fds(connection, HELLO.size, 1)
            key = self._key_of(greeting)
            if key is not None and key in expected:
                made[key] = _made_ready(connection, files, is_maker=False)
            else:
                connection.close()
            for file in files:
                os.close(file)
        return made

    def _key_of(self, greeting: bytes) -> SocketKey | None:
        secret = self.address.secret.encode()
        if len(greeting) != HELLO.size or greeting[-len(secret) :] != secret:
            return None
        return SocketKey(*HELLO.unpack(greeting)[:3])


def connect_all(
    rank: int, tags: Sequence[int], listener: Listener, addresses: Sequence[str], exchange: Exchange, deadline_s: float
) -> DirectSockets:
    """Connect with every rank that can be reached; every rank of the group calls this, and both ends of a pair agree.

    Raises: OSError where a connection breaks while it is made.
    """
    found = [Address(**json.loads(text)) for text in addresses]
    made: dict[SocketKey, DirectSocket] = {}
    for peer in range(rank + 1, len(found)):
        made.update(_connect(rank, peer, tags, found[peer], deadline_s))
    connected = [json.loads(text) for text in exchange("connected", json.dumps([list(key) for key in made]))]
    expected = [SocketKey(peer, *key[1:]) for peer, keys in enumerate(connected) for key in keys if key[0] == rank]
    made |= listener.accept(expected, deadline_s)
    return DirectSockets(made, min(each.max_packet_bytes for each in found))


def _connect(
    rank: int, peer: int, tags: Sequence[int], address: Address, deadline_s: float
) -> Iterator[tuple[SocketKey, DirectSocket]]:
    """Connect to a peer: packets, and shared memory where the system offers it; each for all tags or for none."""
    for is_shared in (False, True) if address.path else ():
        made: dict[SocketKey, DirectSocket] = {}
        try:
            for tag in tags:
                key = SocketKey(peer, tag, is_shared)
                made[key] = _connect_one(rank, key, address, deadline_s)
        except (AttributeError, OSError):  # another host, another user, another view of the files, no such memory
            for each in made.values():
                each.close()
        else:
            yield from made.items()


def _connect_one(rank: int, key: SocketKey, address: Address, deadline_s: float) -> DirectSocket:
    """Connect to a listener and say who this is, with the memory that is to be shared."""
    with ExitStack() as files, ExitStack() as on_failure:
        memory = [shared_memory.make_memory()] if key.is_shared else []
        for file in memory:
            files.callback(os.close, file)
        connection = on_failure.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        connection.settimeout(deadline_s)
        connection.connect(address.path)
        greeting = HELLO.pack(rank, key.tag, key.is_shared, address.secret.encode())
        socket.send_fds(connection, [greeting], memory)
        made = _made_ready(connection, memory, is_maker=True)
        on_failure.pop_all()
    return made


def _made_ready(connection: socket.socket, files: list[int], *, is_maker: bool) -> DirectSocket:
    connection.settimeout(None)
    _make_room(connection)
    carrier = SharedMemory(connection, files[0], is_maker=is_maker) if files else None
    return DirectSocket(connection, carrier)


def _make_room(connection: socket.socket) -> int:
    """Ask for room, and return how large a packet may be so that several can be in flight."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    return min(MAX_PACKET_BYTES, given // (2 * MIN_MESSAGES_IN_FLIGHT))
