"""Links over the backends of torch.distributed: gloo between CPUs, NCCL between GPUs.

Gloo matches messages in order per direction and tag, so one backend serves both directions and all tags. An NCCL
communicator is one queue for both directions and knows no tags: a receive posted ahead would block the sends behind it.
So devices have two for data, and control goes over gloo. NCCL connects a pair at its first message, and blocks both
ends meanwhile. In the order of a program that may deadlock, so one number goes over every channel here, in one order on
all ranks. Nothing ends such a call where the peer does not come, so a thread makes it; a rank that has waited until its
deadline leaves the thread behind, and connects anew.

Guarantees: Ctrl-C ends a wait for gloo in the main thread at once; what gloo may still write into lives until gloo's
own wait has ended; a rank waits for no peer longer than its deadline, and none of what was made is left when it fails.
Relies on: a backend may be used by a thread that has not made it, one thread at a time; gloo's wait ends by its limit;
Python runs handlers of signals in the main thread alone.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import permutations
from queue import SimpleQueue
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from penstock.execute.transport.links import MessageLate, Pending, never
from penstock.execute.transport.protocol import Tag, Transport
from penstock.execute.undocumented_backends import Backend, device_backend, end_group
from penstock.running_time import pause, running_s, wait_in_parts

SHORTEST_WAIT_S = 0.001
"""Torch counts milliseconds and takes 0 for `without limit`."""
PAUSE_S = 20e-6
"""Seconds between two looks at a device."""
LONGEST = timedelta(days=1)
"""The limit of a backend's own waits; a deadline of the transport ends them first."""
PART_S = 0.05
UPWARD, DOWNWARD = "upward", "downward"
"""Names of the backends that carry single messages."""


@dataclass(frozen=True, slots=True, eq=False)
class BackendLink:
    """The messages of one tag to and from one peer; `make_pending` wraps the work that the backend returns."""

    peer: int
    tag: Tag
    outgoing: Backend
    incoming: Backend
    make_pending: Callable[[dist.Work, Tensor], Pending]

    def send(self, tensor: Tensor) -> Pending:
        tensor = tensor.detach()
        try:
            work = self.outgoing.send([tensor], self.peer, self.tag)
        except RuntimeError:
            end_group(self.outgoing)
            raise
        return self.make_pending(work, tensor)

    def receive(self, tensor: Tensor) -> Pending:
        tensor = tensor.detach()
        try:
            work = self.incoming.recv([tensor], self.peer, self.tag)
        except RuntimeError:
            end_group(self.incoming)
            raise
        return self.make_pending(work, tensor)


# ---- gloo


class GlooWaiter:
    """Waits for messages of gloo, for the main thread by a thread of its own.

    Gloo's wait stays in C++ until its deadline, and Python handles Ctrl-C in the main thread alone, between two of its
    own instructions. So the main thread waits for a future, which Ctrl-C interrupts, and the other thread for gloo. A
    wait in slices would be simpler, but one that runs out of time makes gloo's connection unusable.
    """

    def __init__(self) -> None:
        self._waits: _Waits | None = None

    def message(self, work: dist.Work, tensor: Tensor) -> "GlooMessage":
        """Return a posted message for which this object waits."""
        return GlooMessage(work, tensor, self)

    def wait(self, message: "GlooMessage", limit: timedelta) -> None:
        """Block until a message is over. Raises: RuntimeError."""
        if threading.current_thread() is not threading.main_thread():
            message.work.wait(limit)
            return
        if self._waits is None:
            self._waits = SimpleQueue()
            name = "penstock: waits for gloo"
            threading.Thread(target=_serve, args=(self._waits,), name=name, daemon=True).start()
        completion: Future[None] = Future()
        self._waits.put((message, limit, completion))
        try:
            completion.result()
        except BaseException:
            if not completion.done():  # interrupted: the thread is busy until gloo's wait ends
                self.close()
            raise

    def close(self) -> None:
        """Let the thread end with its wait; another one begins at the next wait."""
        waits, self._waits = self._waits, None
        if waits is not None:
            waits.put(None)

    def __del__(self) -> None:
        self.close()


@dataclass(slots=True, eq=False)
class GlooMessage:
    """A message of gloo; the tensor must live as long as the work."""

    work: dist.Work
    tensor: Tensor
    waiter: GlooWaiter

    def is_over(self) -> bool:
        return False  # gloo's works know only once they have been waited for

    def wait(self, deadline_s: float) -> None:
        self.waiter.wait(self, timedelta(seconds=max(deadline_s, SHORTEST_WAIT_S)))


_Waits = SimpleQueue[tuple[GlooMessage, timedelta, Future[None]] | None]


def _serve(waits: _Waits) -> None:
    while (wait := waits.get()) is not None:
        message, limit, completion = wait
        problem: BaseException | None = None
        try:
            message.work.wait(limit)
        except BaseException as error:
            problem = error.with_traceback(None)
        # Dropped before the main thread goes on: a work kept alive would keep gloo's sockets open.
        del wait, message
        if problem is None:
            completion.set_result(None)
        else:
            completion.set_exception(problem)
        del completion, problem


# ---- accelerators


@dataclass(slots=True, eq=False)
class QueuedMessage:
    """A message in a queue of a GPU (NCCL); the tensor must live as long as the work.

    torch's own wait holds the host up, which would not see that a peer is lost or late, or has given up. So the host
    looks by itself.
    """

    work: dist.Work | None
    """None while the group of the message is open: then nothing is launched yet."""
    tensor: Tensor
    is_held_up: Callable[[], bool] = never
    """Whether the device waits for another message meanwhile, which has a deadline of its own."""

    def has_ended(self) -> bool:
        """Look, without blocking, whether it has been sent or received, well or not."""
        return self.work is not None and self.work.is_completed()

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
            cast(dist.Work, self.work).wait()
        else:
            cast(Any, self.work).block_current_stream()

    def _result(self) -> Any:
        """Return NCCL's future, which is done where the message has failed; None for backends that have no such."""
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


def connect_devices(
    store: dist.Store, rank: int, num_ranks: int, device: torch.device, deadline_s: float, names: Sequence[str]
) -> list[Backend]:
    """Return the backends of these names; every rank of the group calls this with the same.

    `UPWARD` and `DOWNWARD`, which come first where they are wanted, carry single messages to higher and to lower ranks.
    Others carry what all ranks begin together: groups of messages, or sums.

    Raises:
        RuntimeError: a rank does not come in time, or a connection breaks.
    """
    backends = [device_backend(device, PrefixStore(name, store), rank, num_ranks, LONGEST) for name in names]
    try:
        num_paired = names.count(UPWARD) + names.count(DOWNWARD)
        _FirstMessages(rank, num_ranks, device, backends, num_paired, deadline_s).exchange()
    except BaseException:
        abort_all(backends, deadline_s)
        raise
    return backends


def abort_all(connections: Sequence[Backend | Transport], limit_s: float) -> None:
    """Abort all connections at once: NCCL's abort of one waits for the messages of the others, which nobody would end.

    It also waits for what else the device runs, and so may not come back; this call returns after `limit_s` at most.
    """
    if len(connections) < 2:
        for connection in connections:
            connection.abort()
        return
    threads = [threading.Thread(target=_abort, args=(connection,), daemon=True) for connection in connections]
    for thread in threads:
        thread.start()
    end_s = running_s() + limit_s
    for thread in threads:
        thread.join(max(end_s - running_s(), 0.0))


def _abort(connection: Backend | Transport) -> None:
    with suppress(Exception):  # a device that has failed may refuse even this
        connection.abort()


class _FirstMessages:
    """Sends one number over every channel of a rank, in one order on all ranks."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        device: torch.device,
        backends: Sequence[Backend],
        num_paired: int,
        deadline_s: float,
    ) -> None:
        """The first `num_paired` backends, two or none, connect each pair of ranks by itself, the others all ranks."""
        self._rank, self._num_ranks, self._device = rank, num_ranks, device
        self._paired, self._of_all = backends[:num_paired], backends[num_paired:]
        self._deadline_s = deadline_s
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self._message_begin_s = running_s()
        """Time at which the message that is under way began."""

    def exchange(self) -> None:
        """Exchange the first messages of all channels, each within the deadline."""
        threading.Thread(target=self._exchange_in_thread, name="penstock: connects devices", daemon=True).start()
        while not wait_in_parts(self._is_over.wait, PART_S):
            # A message's own wait ends at the deadline too; this catches a call that blocks before that wait.
            if running_s() - self._message_begin_s > self._deadline_s + PART_S:
                raise RuntimeError(f"a rank did not connect its device within {self._deadline_s:g} s")
        if self._error is not None:
            raise self._error.with_traceback(None)  # its frames hold backends

    def _exchange_in_thread(self) -> None:
        try:
            if self._device.index is not None:
                torch.accelerator.set_device_index(self._device.index)  # torch keeps it per thread
            self._send_and_receive(torch.zeros(1, device=self._device))
        except MessageLate:
            self._error = RuntimeError(f"a first message did not come within {self._deadline_s:g} s")
        except BaseException as error:
            self._error = error
        self._is_over.set()

    def _send_and_receive(self, number: torch.Tensor) -> None:
        for source, destination in permutations(range(self._num_ranks), 2) if self._paired else ():
            backend = self._paired[source > destination]
            self._message_begin_s = running_s()
            if self._rank == source:
                QueuedMessage(backend.send([number], destination, Tag.DATA), number).wait(self._deadline_s)
            elif self._rank == destination:
                QueuedMessage(backend.recv([number], source, Tag.DATA), number).wait(self._deadline_s)
        for backend in self._of_all:
            self._message_begin_s = running_s()
            QueuedMessage(backend.allreduce([number]), number).wait(self._deadline_s)
