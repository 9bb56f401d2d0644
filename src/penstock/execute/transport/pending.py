"""Posted messages, each kind with its own way to wait."""

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from penstock.execute.transport.direct import Arriving, DirectSocket, Leaving, MessageLate

SHORTEST_WAIT_S = 0.001
"""Torch counts milliseconds and takes 0 for `without limit`."""
PAUSE_S = 20e-6
"""Between two looks at a device."""


class Pending(Protocol):
    """A posted message."""

    def is_over(self) -> bool:
        """Look, without blocking, whether it has been sent or received; False where that cannot be seen."""
        ...

    def wait(self, deadline_s: float) -> None:
        """Block until it is. Raises: RuntimeError, SocketClosed, MessageLate."""
        ...


@dataclass(slots=True, eq=False)
class GlooMessage:
    """A message of gloo; the tensor must live as long as the work."""

    work: dist.Work
    tensor: Tensor

    def is_over(self) -> bool:
        return False  # gloo's works know only once they have been waited for

    def wait(self, deadline_s: float) -> None:
        self.work.wait(timedelta(seconds=max(deadline_s, SHORTEST_WAIT_S)))


@dataclass(slots=True, eq=False)
class QueuedMessage:
    """A message in a queue of a GPU (NCCL); the tensor must live as long as the work.

    torch's wait without a deadline lets the current stream wait and the host go on, so that nobody would see a peer
    that is lost or late; with a deadline the host sleeps a millisecond between its looks. So the host looks by itself.
    """

    work: dist.Work
    tensor: Tensor

    def is_over(self) -> bool:
        if not self.work.is_completed():
            return False
        self.work.wait()  # raises what went wrong; otherwise, the current stream goes on behind the message
        return True

    def wait(self, deadline_s: float) -> None:
        end_s = time.monotonic() + deadline_s
        while not self.is_over():
            if time.monotonic() >= end_s:
                raise MessageLate
            time.sleep(PAUSE_S)


@dataclass(slots=True, eq=False)
class DirectSend:
    """A message past gloo for which there was no room yet."""

    socket: DirectSocket
    leaving: Leaving

    def is_over(self) -> bool:
        return self.leaving.is_done

    def wait(self, deadline_s: float) -> None:
        self.socket.wait_sent(self.leaving, deadline_s)


@dataclass(slots=True, eq=False)
class DirectReceive:
    """A message past gloo that is to come."""

    socket: DirectSocket
    arriving: Arriving

    def is_over(self) -> bool:
        return self.socket.has_arrived(self.arriving)

    def wait(self, deadline_s: float) -> None:
        end_s = time.monotonic() + deadline_s
        while not self.socket.has_arrived(self.arriving):
            self.socket.wait_readable(max(end_s - time.monotonic(), 0.0))
