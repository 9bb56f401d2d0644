"""Sockets straight between ranks of one host, which carry messages without gloo.

For every message gloo writes three times and wakes a thread of its own on both ends, which for a small message costs
ten times what the kernel takes to hand it over. Here the sender writes once and the receiver reads once: small messages
as packets of the socket, larger ones through memory that both ends see (`shared_memory.py`). Which of the two a message
takes is decided by its size alone, which both ends know, so both look for it in the same place; each way keeps its own
order. How ranks find each other stands in `rendezvous.py`.

Guarantees: as `links.py` says; a thread sends the messages for which there was no room. Relies on: a socket is used by
one thread besides that one, which writes only while messages wait for room.
"""

import ctypes
import select
import socket
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Condition, Thread
from typing import Protocol

from torch import Tensor

from penstock.execute.transport.links import LinkClosed, MessageLate, SizesDiffer
from penstock.running_time import running_s, wait_in_parts

SEND_FLAGS = int(socket.MSG_DONTWAIT)
RECEIVE_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_TRUNC)
"""The length of a message that is too long is told, too."""
CLOSED = "it has closed its socket"
EMPTY = b"\0"
"""The packet of a tensor without elements: a packet without bytes would look like the end of the connection."""


@dataclass(slots=True, eq=False)
class Arriving:
    """A message that is to come."""

    socket: "DirectSocket"
    number: int
    """Index of the message among all that were asked for."""

    def is_over(self) -> bool:
        return self.socket.has_arrived(self.number)

    def wait(self, deadline_s: float) -> None:
        end_s = running_s() + deadline_s
        while not self.socket.has_arrived(self.number):
            self.socket.wait_readable(max(end_s - running_s(), 0.0))


@dataclass(slots=True, eq=False)
class Leaving:
    """A message for which there was no room yet."""

    overflow: "_Overflow"
    tensor: Tensor
    is_done: bool = False

    def is_over(self) -> bool:
        return self.is_done

    def wait(self, deadline_s: float) -> None:
        self.overflow.wait(self, deadline_s)


class Carrier(Protocol):
    """How messages get over a socket; all its methods raise OSError where the peer is gone."""

    def write(self, tensor: Tensor) -> None:
        """Hand a message over without blocking. Raises: BlockingIOError if there is no room."""

    def write_when_there_is_room(self, tensor: Tensor) -> None:
        """Block until a message is handed over."""

    def read(self, tensor: Tensor) -> int:
        """Fill a tensor with the next message and return the message's bytes.

        Without blocking; where the bytes are not the tensor's, its values are of no use. Raises: BlockingIOError if
        the message is not there yet, or not all of it.
        """


class Packets:
    """One packet of the socket for each message."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def write(self, tensor: Tensor) -> None:
        self._connection.send(_memory_of(tensor) if tensor.nbytes else EMPTY, SEND_FLAGS)

    def write_when_there_is_room(self, tensor: Tensor) -> None:
        self._connection.send(_memory_of(tensor) if tensor.nbytes else EMPTY)

    def read(self, tensor: Tensor) -> int:
        buffer = _memory_of(tensor) if tensor.nbytes else bytearray(EMPTY)
        num_bytes = self._connection.recv_into(buffer, 0, RECEIVE_FLAGS)
        if num_bytes == 0:
            raise BrokenPipeError(CLOSED)
        return 0 if num_bytes == len(EMPTY) and not tensor.nbytes else num_bytes


class DirectSocket:
    """The messages of one size class to and from one peer, for one purpose."""

    def __init__(self, connection: socket.socket, carrier: Carrier | None = None) -> None:
        """Use packets unless there is another carrier."""
        self._connection = connection
        self._carrier = carrier or Packets(connection)
        self._expected: deque[Tensor] = deque()
        """Tensors that the next messages fill, in order."""
        self._num_arrived = 0
        self._overflow = _Overflow(self._carrier)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def send(self, tensor: Tensor) -> Leaving | None:
        """Send a contiguous tensor without blocking; what is returned, if anything, must be waited for."""
        # A channel keeps its order: messages that wait for room go first, even if there is room by now.
        if not self._overflow.is_empty:
            return self._overflow.add(tensor)
        try:
            self._carrier.write(tensor)
        except BlockingIOError:
            return self._overflow.add(tensor)
        except OSError as error:
            raise LinkClosed(str(error)) from error
        return None

    def receive(self, tensor: Tensor) -> Arriving:
        """Let the next message fill this tensor."""
        self._expected.append(tensor)
        return Arriving(self, self._num_arrived + len(self._expected) - 1)

    def has_arrived(self, number: int) -> bool:
        """Read what is there, up to this message; tell whether it was there. Raises: LinkClosed, SizesDiffer."""
        while self._num_arrived <= number:
            first = self._expected[0]
            try:
                num_bytes = self._carrier.read(first)
            except BlockingIOError:
                return False
            except OSError as error:
                raise LinkClosed(str(error)) from error
            if num_bytes != first.nbytes:
                raise SizesDiffer(f"it sent {num_bytes} bytes, expected {first.nbytes}")
            self._expected.popleft()
            self._num_arrived += 1
        return True

    def wait_readable(self, deadline_s: float) -> None:
        """Block until something can be read. Raises: MessageLate."""
        if not wait_in_parts(lambda part_s: self._poll.poll(part_s * 1000), deadline_s):
            raise MessageLate

    def close(self) -> None:
        """Close the socket, which wakes those who wait at either end."""
        with suppress(OSError):  # the peer may have closed it before
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def close_copy(self) -> None:
        """Close a forked process's copy of this end, which its parent goes on using."""
        self._connection.close()

    def __del__(self) -> None:
        self._connection.close()  # of a transport that was dropped without closing it


class _Overflow:
    """Sends in order what there was no room for, from a thread of its own, so that computation never waits."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._queue: deque[Leaving] = deque()
        self._changed = Condition()
        self._problem = ""

    @property
    def is_empty(self) -> bool:
        return not self._queue

    def add(self, tensor: Tensor) -> Leaving:
        leaving = Leaving(self, tensor)
        with self._changed:
            self._queue.append(leaving)
            if len(self._queue) == 1:
                Thread(target=self._drain, name="penstock: messages that wait for room", daemon=True).start()
        return leaving

    def wait(self, leaving: Leaving, deadline_s: float) -> None:
        with self._changed:
            has_ended = partial(self._changed.wait_for, lambda: leaving.is_done or bool(self._problem))
            is_over = wait_in_parts(has_ended, deadline_s)
            if leaving.is_done:
                return
            raise LinkClosed(self._problem) if is_over else MessageLate

    def _drain(self) -> None:
        while True:
            try:
                self._carrier.write_when_there_is_room(self._queue[0].tensor)
            except OSError as error:  # the queue stays, so that everything behind this message fails too
                with self._changed:
                    self._problem = str(error)
                    self._changed.notify_all()
                return
            # It leaves the queue only now. Before, `is_empty` would let the next message overtake it.
            with self._changed:
                self._queue.popleft().is_done = True
                self._changed.notify_all()
                if not self._queue:
                    return


def _memory_of(tensor: Tensor) -> "ctypes.Array[ctypes.c_char]":
    """The bytes of a contiguous tensor on the CPU, of whichever type; valid as long as the tensor."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
