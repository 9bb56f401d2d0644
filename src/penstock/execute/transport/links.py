"""`Link`: how the messages of one tag get to one peer and back, whatever carries them.

    packets of a socket     small messages between ranks of one host      `sockets.py`
    shared memory           large ones                                    `shared_memory.py`
    gloo                    between CPUs of several hosts                 `backend_links.py`
    NCCL and its like       between accelerators                          `backend_links.py`

A transport has one link per peer and tag, since its peers may be on its own host and on others. A link knows nothing
of ranks' names, tickets, deadlines of steps or recovery: those are once, in the transport.

Guarantees: no post waits, and messages arrive in the order of posting. Relies on: a link is used by one thread; nobody
changes or frees the memory of a message before it has left, or has arrived.
"""

from dataclasses import dataclass
from typing import NoReturn, Protocol

from torch import Tensor


class MessageLate(RuntimeError):
    """Nothing came, or could leave, in time."""


class LinkClosed(RuntimeError):
    """The peer is gone, or this rank has closed the link."""


class SizesDiffer(Exception):
    """The peer sent a message of another size than this rank expects."""


class Pending(Protocol):
    """A message that has been posted and is not over."""

    def is_over(self) -> bool:
        """Look, without blocking, whether it has been sent or received; False where that cannot be seen."""

    def wait(self, deadline_s: float) -> None:
        """Block until it is over. Raises: SizesDiffer, RuntimeError (`LinkClosed`, `MessageLate` and others)."""


class Link(Protocol):
    """Carries contiguous tensors to one peer and from it."""

    def send(self, tensor: Tensor) -> Pending | None:
        """Send a tensor without blocking; None where it has left. Raises: RuntimeError."""

    def receive(self, tensor: Tensor) -> Pending:
        """Let the next message fill this tensor, without blocking. Raises: RuntimeError."""


@dataclass(frozen=True, slots=True, eq=False)
class BySize:
    """Carries small messages over one link and large ones over another; both ends know the size, and look alike."""

    small: Link
    large: Link
    max_small_bytes: int

    def send(self, tensor: Tensor) -> Pending | None:
        return (self.small if tensor.nbytes <= self.max_small_bytes else self.large).send(tensor)

    def receive(self, tensor: Tensor) -> Pending:
        return (self.small if tensor.nbytes <= self.max_small_bytes else self.large).receive(tensor)


class Closed:
    """The link to every peer between an abort and the next recovery."""

    def send(self, tensor: Tensor) -> NoReturn:
        raise LinkClosed("this rank has aborted or closed its connections")

    receive = send


CLOSED = Closed()


def never() -> bool:
    """The answer of a device that waits for no peer by itself."""
    return False
