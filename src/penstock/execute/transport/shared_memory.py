"""Messages of some size between ranks of one host, through memory that both see.

The sender copies a message into the memory and tells its place over the socket of the pair; the receiver copies it out.
So a message has left when it is posted, and costs two copies and a packet, where gloo takes a message over the loopback
interface in pieces, with a thread at both ends. A message that is larger than a piece goes as several, which the
receiver puts together. The memory has no name (`memfd_create` of Linux): it is handed over with the socket and gone
with the last of both processes, however they end.

Guarantees: a place is written again only after the receiver has copied it out, and a receiver reads only what is there
whole. Relies on: each half has one process that writes it and one that reads it; the copy is over before the packet
that tells its place is sent, and a processor stores the 8 bytes of the count at once.
"""

import ctypes
import mmap
import os
import select
import socket
import struct
from collections import deque

from torch import Tensor

from penstock.execute.transport.sockets import CLOSED, SEND_FLAGS

ROOM_BYTES = 2**25
"""Bytes for messages under way in one direction; the system gives only as many as were ever used at once."""
PIECE_BYTES = ROOM_BYTES // 4
"""The most of a message that goes at once, so that one end copies a piece while the other copies the next."""
ALIGNMENT = 64
HEAD_BYTES = ALIGNMENT
"""Bytes in front of the room, with the number of pieces that the receiver has taken."""
HALF_BYTES = HEAD_BYTES + ROOM_BYTES
NOTE = struct.Struct("<qqq")
"""Where a piece begins, its bytes, and those of the whole message."""
MILLISECONDS_BETWEEN_LOOKS = 1


def make_memory() -> int:
    """Return the file of a memory for both directions. Raises: AttributeError, OSError where there is none."""
    return memory_file("penstock", 2 * HALF_BYTES)


def memory_file(name: str, num_bytes: int) -> int:
    """Return a file that is memory and has no path. Raises: AttributeError, OSError: no such, or a limit of its size.

    Such files count for the limit of files (`ulimit -f`), too.
    """
    file = os.memfd_create(name)
    try:
        os.ftruncate(file, num_bytes)
    except BaseException:
        os.close(file)
        raise
    return file


class SharedMemory:
    """Carries the messages of one socket; the rank that made the memory sends through its first half.

    The file may be closed afterwards. Raises: OSError if the memory cannot be had.
    """

    def __init__(self, connection: socket.socket, file: int, *, is_maker: bool) -> None:
        self._connection = connection
        memory = mmap.mmap(file, 2 * HALF_BYTES)
        first, second = (_Half(memory, begin) for begin in (0, HALF_BYTES))
        self._outgoing, self._incoming = (first, second) if is_maker else (second, first)
        self._room = _Room(ROOM_BYTES)
        self._num_pieces_received = 0
        self._bytes_written = 0
        """Bytes of the message under way that have been handed over."""
        self._bytes_read = 0
        self._hang_up = select.poll()
        self._hang_up.register(connection, 0)  # nothing but the end of the connection

    def write(self, tensor: Tensor) -> None:
        """Hand over as many pieces as have room. Raises: BlockingIOError if any is left; the next call begins there."""
        while self._bytes_written < tensor.nbytes:
            num_bytes = min(PIECE_BYTES, tensor.nbytes - self._bytes_written)
            begin = self._room.find(num_bytes, self._outgoing.num_taken.value)
            if begin is None:
                raise BlockingIOError
            ctypes.memmove(self._outgoing.address + begin, tensor.data_ptr() + self._bytes_written, num_bytes)
            # The socket may have no room either. Then the place is not taken, and the next attempt writes there again.
            self._connection.send(NOTE.pack(begin, num_bytes, tensor.nbytes), SEND_FLAGS)
            self._room.take(begin, num_bytes)
            self._bytes_written += num_bytes
        self._bytes_written = 0

    def write_when_there_is_room(self, tensor: Tensor) -> None:
        while True:
            try:
                return self.write(tensor)
            except BlockingIOError:
                if self._hang_up.poll(MILLISECONDS_BETWEEN_LOOKS):
                    raise BrokenPipeError(CLOSED) from None

    def read(self, tensor: Tensor) -> int:
        while note := self._connection.recv(NOTE.size, socket.MSG_DONTWAIT):
            begin, num_bytes, message_bytes = NOTE.unpack(note)
            if message_bytes == tensor.nbytes:
                ctypes.memmove(tensor.data_ptr() + self._bytes_read, self._incoming.address + begin, num_bytes)
            # After the copy: from this moment the sender may write over the place.
            self._num_pieces_received += 1
            self._incoming.num_taken.value = self._num_pieces_received
            self._bytes_read += num_bytes
            if self._bytes_read == message_bytes or message_bytes != tensor.nbytes:
                self._bytes_read = 0
                return int(message_bytes)
        raise BrokenPipeError(CLOSED)


class _Half:
    """The memory of one direction, as one process sees it.

    Bytes that count as taken may be written over. No processor moves the copy past the count: a call into the system,
    or the release of Python's lock, lies between them.
    """

    def __init__(self, memory: mmap.mmap, begin: int) -> None:
        self.num_taken = ctypes.c_uint64.from_buffer(memory, begin)  # keeps the memory, too
        self.address = ctypes.addressof(self.num_taken) + HEAD_BYTES


class _Room:
    """Where the sender's messages lie, which are taken in the order in which they were put.

    An empty room is filled from its beginning again, so that a few pages, and caches, see all traffic.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._under_way: deque[range] = deque()
        self._num_freed = 0

    def find(self, num_bytes: int, num_taken: int) -> int | None:
        """Return where a message has room once so many of all were taken, or None."""
        while self._num_freed < num_taken:
            self._under_way.popleft()
            self._num_freed += 1
        if not self._under_way:
            return 0 if num_bytes <= self._num_bytes else None
        first, last = self._under_way[0].start, self._under_way[-1].stop
        if last > first:  # what is free lies behind the last one and before the first
            if last + num_bytes <= self._num_bytes:
                return last
            last = 0
        return last if last + num_bytes <= first else None

    def take(self, begin: int, num_bytes: int) -> None:
        """Put a message there."""
        self._under_way.append(range(begin, begin + -(-num_bytes // ALIGNMENT) * ALIGNMENT))
