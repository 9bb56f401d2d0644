"""Posted messages, each kind with its own way to wait.

Guarantees: Ctrl-C ends a wait in the main thread at once, and what gloo may still write into lives on until gloo's own
wait has ended. Relies on: gloo's wait may run on another thread than the one that posted the message, and ends by its
limit; Python runs handlers of signals in the main thread alone.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol, cast

import torch.distributed as dist
from torch import Tensor

from penstock.execute.transport.sockets import Arriving, DirectSocket, MessageLate
from penstock.running_time import pause, running_s

SHORTEST_WAIT_S = 0.001
"""Torch counts milliseconds and takes 0 for `without limit`."""
PAUSE_S = 20e-6
"""Between two looks at a device."""


def never() -> bool:
    """What a device is that waits for no peer by itself."""
    return False


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
        _wait_interruptibly(self, timedelta(seconds=max(deadline_s, SHORTEST_WAIT_S)))


@dataclass(slots=True, eq=False)
class QueuedMessage:
    """A message in a queue of a GPU (NCCL); the tensor must live as long as the work.

    torch's own wait holds the host up, which would not see that a peer is lost or late, or has given up. So the host
    looks by itself.
    """

    work: dist.Work
    tensor: Tensor
    is_held_up: Callable[[], bool] = never
    """Whether the device waits for another message meanwhile, which has a deadline of its own."""

    def has_ended(self) -> bool:
        """Look, without blocking, whether it has been sent or received, well or not."""
        return self.work.is_completed()

    def is_over(self) -> bool:
        if not self.has_ended():
            return False
        result = self._result()
        if result is not None and result.done():  # `wait` would say why, but only after an abort of this backend alone
            raise RuntimeError("NCCL has lost the connection; the lines of ProcessGroupNCCL in the log say why")
        self.follow()
        return True

    def follow(self) -> None:
        """Let the current stream wait for the message, and the host go on."""
        if self._result() is None:
            self.work.wait()
        else:
            cast(Any, self.work).block_current_stream()

    def _result(self) -> Any:
        """Of NCCL as `device_backend` makes it, it is done where the message has failed; other backends know none."""
        try:
            return cast(Any, self.work).get_future_result()
        except RuntimeError:
            return None

    def wait(self, deadline_s: float) -> None:
        end_s = running_s() + deadline_s
        while not self.is_over():
            if self.is_held_up():
                end_s = running_s() + deadline_s
            elif running_s() >= end_s:
                raise MessageLate
            pause(PAUSE_S)


@dataclass(slots=True, eq=False)
class DirectReceive:
    """A message past gloo that is to come."""

    socket: DirectSocket
    arriving: Arriving

    def is_over(self) -> bool:
        return self.socket.has_arrived(self.arriving)

    def wait(self, deadline_s: float) -> None:
        end_s = running_s() + deadline_s
        while not self.socket.has_arrived(self.arriving):
            self.socket.wait_readable(max(end_s - running_s(), 0.0))


@dataclass(slots=True, eq=False)
class _Wait:
    """One wait for a message of gloo, which a helper thread does for the main thread."""

    message: GlooMessage | None
    """With its tensor, into which gloo may write as long as the wait goes on."""
    limit: timedelta
    is_over: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class _Waiter:
    """A thread that waits for messages of gloo.

    Gloo's wait stays in C++ until its deadline, and Python handles Ctrl-C in the main thread alone, between two of its
    own instructions. So the main thread waits for an event, which Ctrl-C interrupts, and this thread for gloo. A wait
    in slices would be simpler, but one that runs out of time makes gloo's connection unusable.
    """

    def __init__(self) -> None:
        self._waits: SimpleQueue[_Wait | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="penstock: waits for gloo", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()  # not in a forked process

    def wait(self, message: GlooMessage, limit: timedelta) -> None:
        wait = _Wait(message, limit)
        self._waits.put(wait)
        try:
            wait.is_over.wait()
        except BaseException:
            self._waits.put(None)  # the thread ends when its wait does
            raise
        if wait.error is not None:
            raise wait.error

    def _serve(self) -> None:
        while (wait := self._waits.get()) is not None:
            assert wait.message is not None
            try:
                wait.message.work.wait(wait.limit)
            except BaseException as error:
                wait.error = error.with_traceback(None)  # a work kept alive would keep gloo's sockets open
            wait.message = None
            wait.is_over.set()
            del wait


_idle: list[_Waiter] = []


def _wait_interruptibly(message: GlooMessage, limit: timedelta) -> None:
    if threading.current_thread() is not threading.main_thread():
        message.work.wait(limit)
        return
    waiter = _idle.pop() if _idle and _idle[-1].is_alive else _Waiter()
    waiter.wait(message, limit)
    _idle[:] = [waiter]  # one whose wait was interrupted is not used again
