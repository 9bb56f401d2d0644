"""How the ranks of a group find each other: rounds in their store, then sockets straight between ranks of one host.

    store       each rank enters a round and writes down where it listens; all wait for all
    sockets     of a pair, the lower rank connects to the listener of the higher one and hands over its ends of all
    store       each rank writes down which sockets it has handed over; the others take exactly these

A listener has a name that belongs to no file; a rank that connects shows a secret and must be of the same user. Ranks
that cannot reach each other so, such as those of other hosts, stay with gloo for everything.

Guarantees: ranks that come to a round get the same empty store, both ends of a pair agree whether they have sockets,
and each wait for a peer has a deadline. Relies on: the store adds to a counter in one piece; one thread of a rank at a
time enters a round; the system tells the truth on the user at the other end of a socket.
"""

import json
import math
import os
import secrets
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.errors import PeerLost
from penstock.execute.transport import shared_memory
from penstock.execute.transport.links import BySize, Link
from penstock.execute.transport.protocol import missing_ranks
from penstock.execute.transport.rank_names import RankNames
from penstock.execute.transport.shared_memory import SharedMemory
from penstock.execute.transport.sockets import DirectSocket
from penstock.running_time import pause, running_s

MAX_PACKET_BYTES = 65536
"""Bytes of the largest small message; too few larger ones would have room at once in what systems give a socket."""
BUFFER_BYTES = 2**20
"""Bytes that the system is asked for, for messages on their way; it may give less."""
MIN_MESSAGES_IN_FLIGHT = 3
HELLO = struct.Struct("<q16s")
"""The greeting of a peer that connects: its rank and the listener's secret."""
CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a peer, as the system gives them."""
MAX_FILES = 253
"""The most files that the system hands over at once."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 2e-4, 0.02
"""The first and the longest pause between two looks into the store; each is twice as long as the one before."""
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

    def __init__(self, store: Store, rank: int, names: RankNames, is_vain: Callable[[], bool] = bool) -> None:
        """`is_vain` says whether a rank has left for good, so that none waits for it until a deadline."""
        self._store = store
        self._is_vain = is_vain
        self._rank = rank
        self._names = names
        self._num_ranks = len(names.numbers)
        self._round = -1

    def enter(self) -> Store:
        """Begin a round; return a store that is empty and the same for all ranks that come to it."""
        counter = f"rounds/{self._rank}"
        entered = self._store.add(counter, 1) - 1
        self._round = max(entered, self._store.add("min_round", 0))
        if self._round > entered:
            self._store.add(counter, self._round - entered)
        return PrefixStore(f"{self._round}", self._store)

    def exchange(self, name: str, text: str, deadline_s: float) -> list[str]:
        """Wait until all ranks have given a text under this name in this round; return all of them.

        Raises: DeadlineExceeded, naming the ranks that did not come, at once where one has left; PeerLost where one
        gave up.
        """
        begin_s = running_s()
        keys = [f"{self._round}/{name}/{rank}" for rank in range(self._num_ranks)]
        self._store.set(keys[self._rank], text)
        if missing := await_keys(self._store, keys, deadline_s, self._is_vain):
            self.give_up()
            raise missing_ranks(self._names, self._rank, missing, running_s() - begin_s)
        texts = [text.decode() for text in self._store.multi_get(keys)]
        if GAVE_UP in texts:
            lost_rank = texts.index(GAVE_UP)
            number = self._names.numbers[lost_rank]
            raise PeerLost(f"{self._names[lost_rank]} could not connect; look at its output", rank=number, peer=number)
        return texts

    def give_up(self, *names: str) -> None:
        """Make every rank skip this round, because this rank has left it, and tell those that wait for these names."""
        for name in names:
            self._store.set(f"{self._round}/{name}/{self._rank}", GAVE_UP)
        min_round = self._store.add("min_round", 0)
        if min_round <= self._round:
            self._store.add("min_round", self._round + 1 - min_round)


def await_keys(store: Store, keys: list[str], deadline_s: float, is_vain: Callable[[], bool] = bool) -> list[int]:
    """Wait until a store has all keys; return the indices of those that it lacks at the deadline, or once `is_vain`."""
    # Looked for by hand, since the store's own wait stays in C++ until the deadline, and holds Ctrl-C as long.
    begin_s, pause_s = running_s(), SHORTEST_PAUSE_S
    while not store.check(keys):
        waited_s = running_s() - begin_s
        if waited_s >= deadline_s or is_vain():
            return [index for index, key in enumerate(keys) if not store.check([key])]
        pause(min(pause_s, deadline_s - waited_s))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    return []


class SocketKey(NamedTuple):
    """One of the sockets of a rank."""

    peer: int
    tag: int
    is_shared: bool
    """Whether messages go through memory that both ends see."""


Keys = Sequence[SocketKey]


@dataclass(frozen=True, slots=True, eq=False)
class DirectSockets:
    """The sockets of one rank; to a peer that cannot be reached there is none."""

    by_key: dict[SocketKey, DirectSocket]
    max_packet_bytes: int
    """Bytes of the largest message that goes as a packet; larger ones go through memory."""
    is_complete: bool = False
    """Whether every rank of the group has all sockets to all others, so that nothing needs another way."""

    def link(self, peer: int, tag: int, fallback: Link) -> Link:
        """Return the link for the messages of a tag to a peer; what no socket carries goes over `fallback`."""
        packets = self.by_key.get(SocketKey(peer, tag, False))
        if packets is None:
            return fallback
        memory = self.by_key.get(SocketKey(peer, tag, True))
        return BySize(packets, memory or fallback, self.max_packet_bytes)

    def close(self) -> None:
        for direct_socket in self.by_key.values():
            direct_socket.close()

    def close_copies(self) -> None:
        """Close a forked process's copies.

        A forked process, such as a loader of data, must not keep sockets open: the peers of a killed rank would see no
        end of file until it has ended too.
        """
        for direct_socket in self.by_key.values():
            direct_socket.close_copy()


NO_SOCKETS = DirectSockets({}, 0)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a rank listens, as all ranks know it."""

    name: str = ""
    """The name under which it listens; empty where it does not."""
    secret: str = ""
    max_packet_bytes: int = MAX_PACKET_BYTES


class Listener:
    """Where the sockets of one rank are connected, until the stack is closed.

    Its name is in no folder (Linux's abstract names), so nothing stays behind, however a rank ends. Names have no
    permissions: so both ends ask the system for the other's user.
    """

    def __init__(self, stack: ExitStack, *, is_wanted: bool = True) -> None:
        """Listen under a new name, if that is wanted and the system has such names."""
        self.address = Address()
        if not is_wanted:
            return
        try:
            name = f"\0penstock-{secrets.token_hex(16)}"
            self._socket = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            self._socket.bind(name)
            self._socket.listen(socket.SOMAXCONN)
            self.address = Address(name, secrets.token_hex(8), _make_room(self._socket))
        except (AttributeError, OSError):  # a system without such sockets or names
            pass

    def address_text(self) -> str:
        """Return what the other ranks need to connect (`connect_all`)."""
        return json.dumps(asdict(self.address))

    def accept(self, expected: Mapping[int, Keys], deadline_s: float) -> dict[SocketKey, DirectSocket]:
        """Take the sockets of the expected peers, all of which have connected already, and no others."""
        sockets: dict[SocketKey, DirectSocket] = {}
        keys_by_peer = dict(expected)
        while keys_by_peer:
            self._socket.settimeout(deadline_s)
            connection, _ = self._socket.accept()
            with connection:
                if not _is_same_user(connection):
                    continue
                connection.settimeout(deadline_s)
                greeting, files, _, _ = socket.recv_fds(connection, HELLO.size, MAX_FILES)
            with ExitStack() as on_failure:
                for file in files:
                    on_failure.callback(os.close, file)
                keys = keys_by_peer.pop(self._peer_of(greeting), None)
                if keys is None:
                    continue
                if len(files) < len(keys) + sum(key.is_shared for key in keys):
                    raise OSError("the system handed over too few files; raise the limit of open files (ulimit -n)")
                on_failure.pop_all()
            sockets |= _received_sockets(keys, files)
        return sockets

    def _peer_of(self, greeting: bytes) -> int:
        """Return the rank of a peer that has greeted with the secret; -1 for a stranger."""
        if len(greeting) != HELLO.size:
            return -1
        peer, secret = HELLO.unpack(greeting)
        return int(peer) if secret == self.address.secret.encode() else -1


def connect_all(
    rank: int, tags: Sequence[int], listener: Listener, texts: Sequence[str], exchange: Exchange, deadline_s: float
) -> DirectSockets:
    """Connect with every rank that can be reached; every rank of the group calls this, and both ends of a pair agree.

    `texts` are the addresses of all ranks (`Listener.address_text`).
    Raises: OSError where a connection breaks while it is made.
    """
    addresses = [Address(**json.loads(text)) for text in texts]
    sockets: dict[SocketKey, DirectSocket] = {}
    for peer in range(rank + 1, len(addresses)):
        sockets |= _sockets_to_peer(rank, peer, tags, addresses[peer], deadline_s)
    key_texts = exchange("connected", json.dumps(list(sockets)))
    rank_keys = [[SocketKey(*key) for key in json.loads(text)] for text in key_texts]
    keys_here = [[key._replace(peer=peer) for key in keys if key.peer == rank] for peer, keys in enumerate(rank_keys)]
    sockets |= listener.accept({peer: keys for peer, keys in enumerate(keys_here) if keys}, deadline_s)
    num_pairs, num_connected = math.comb(len(addresses), 2), sum(map(len, rank_keys))
    is_complete = bool(tags) and num_connected == num_pairs * len(tags) * 2  # with memory and without
    return DirectSockets(sockets, min(address.max_packet_bytes for address in addresses), is_complete)


def _sockets_to_peer(
    rank: int, peer: int, tags: Sequence[int], address: Address, deadline_s: float
) -> dict[SocketKey, DirectSocket]:
    """Make all sockets between this rank and a peer on the same host, and hand the peer its ends of them.

    `address` is where the peer listens. Each tag, a kind of message, gets one socket for packets, and where the system
    has shared memory, another one beside a piece of that memory. The result has this rank's ends; it is empty where the
    peer cannot be reached, such as on another host.
    """
    if not address.name:
        return {}
    sockets: dict[SocketKey, DirectSocket] = {}
    try:
        # Files in `handed_over` are closed here in any case, since the peer gets duplicates of them. This rank's own
        # ends, in `on_failure`, are closed only if not all of them could be handed over.
        with ExitStack() as handed_over, ExitStack() as on_failure:
            connection = handed_over.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            connection.settimeout(deadline_s)
            connection.connect(address.name)
            if not _is_same_user(connection):
                return {}
            files: list[int] = []
            for key, memory in _memory_files(peer, tags, handed_over).items():
                local_end, peer_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                on_failure.enter_context(local_end)
                handed_over.enter_context(peer_end)
                _make_room(local_end)
                _make_room(peer_end)
                sockets[key] = _direct_socket(local_end, memory, is_maker=True)
                files += [peer_end.fileno()] if memory is None else [peer_end.fileno(), memory]
            # The peer takes files only from a rank that knows the secret of its address.
            socket.send_fds(connection, [HELLO.pack(rank, address.secret.encode())], files)
            on_failure.pop_all()
    except (AttributeError, OSError):  # another host, no more files, a peer that has gone
        return {}
    return sockets


def _memory_files(peer: int, tags: Sequence[int], stack: ExitStack) -> dict[SocketKey, int | None]:
    """Return the files of shared memory by socket: None for a socket of packets, no others where there is no memory."""
    memory_files: dict[SocketKey, int | None] = {SocketKey(peer, tag, False): None for tag in tags}
    try:
        files_of_tags = [shared_memory.make_memory() for _ in tags]
    except (AttributeError, OSError):
        return memory_files
    for tag, memory in zip(tags, files_of_tags, strict=True):
        stack.callback(os.close, memory)
        memory_files[SocketKey(peer, tag, True)] = memory
    return memory_files


def _received_sockets(keys: Keys, files: Sequence[int]) -> dict[SocketKey, DirectSocket]:
    """Make the sockets that a peer has handed over; their files come in the order of the keys."""
    sockets: dict[SocketKey, DirectSocket] = {}
    remaining_files = iter(files)
    for key in keys:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=next(remaining_files))
        memory = next(remaining_files) if key.is_shared else None
        sockets[key] = _direct_socket(connection, memory, is_maker=False)
        if memory is not None:
            os.close(memory)  # it is mapped
    return sockets


def _direct_socket(connection: socket.socket, memory: int | None, *, is_maker: bool) -> DirectSocket:
    return DirectSocket(connection, None if memory is None else SharedMemory(connection, memory, is_maker=is_maker))


def _is_same_user(connection: socket.socket) -> bool:
    """Whether the other end belongs to the user of this process, as the system says."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return bool(CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def _make_room(connection: socket.socket) -> int:
    """Ask for room, and return how large a packet may be so that several can be in flight."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    granted_bytes = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    return min(MAX_PACKET_BYTES, granted_bytes // (2 * MIN_MESSAGES_IN_FLIGHT))
