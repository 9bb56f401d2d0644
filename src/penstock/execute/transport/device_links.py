"""Connects the accelerators of a group: the backends of their messages, and a first message on every channel.

NCCL connects a pair at its first message, and blocks both ends meanwhile. In the order of a program that may deadlock.
So one number goes over every channel here, in one order on all ranks. Nothing ends such a call where the peer does not
come, so a thread makes it; a rank that has waited until its deadline leaves the thread behind, and connects anew.

Guarantees: a rank waits for no peer longer than its deadline, and none of what was made is left when it fails.
Relies on: backends may be used by a thread that is not the one that made them, one thread at a time.
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import permutations
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from penstock.execute.transport.pending import QueuedMessage
from penstock.execute.transport.protocol import Tag
from penstock.execute.transport.sockets import MessageLate
from penstock.execute.undocumented_backends import Backend, device_backend
from penstock.running_time import running_s, wait_in_parts

LONGEST = timedelta(days=1)
"""The limit of a backend's own waits, which a deadline of ours ends first."""
PART_S = 0.05


def connect_devices(
    store: dist.Store, rank: int, num_ranks: int, device: torch.device, deadline_s: float, *, has_sums: bool = False
) -> list[Backend]:
    """Return the backends of messages to higher and to lower ranks, and that of sums; every rank of the group calls it.

    Raises:
        RuntimeError: a rank does not come in time, or a connection breaks.
    """
    names = ["upward", "downward", *(["sums"] if has_sums else [])]
    made = [device_backend(device, PrefixStore(name, store), rank, num_ranks, LONGEST) for name in names]
    try:
        _FirstMessages(rank, num_ranks, device, made, deadline_s).exchange()
    except BaseException:
        abort_all(made, deadline_s)
        raise
    return made


class Abortable(Protocol):
    """A backend, or a transport that has some."""

    def abort(self) -> None: ...


def abort_all(several: Sequence[Abortable], limit_s: float) -> None:
    """Abort at once: an abort of NCCL's waits for the messages of the others, which nobody would end.

    It waits for what else the device runs, too, and so may not come back; nobody waits longer than `limit_s`.
    """
    if len(several) < 2:
        for each in several:
            each.abort()
        return
    threads = [threading.Thread(target=_abort, args=(each,), daemon=True) for each in several]
    for thread in threads:
        thread.start()
    end_s = running_s() + limit_s
    for thread in threads:
        thread.join(max(end_s - running_s(), 0.0))


def _abort(each: Abortable) -> None:
    with suppress(Exception):  # a device that has failed may refuse even this
        each.abort()


class _FirstMessages:
    """One number over every channel of a rank."""

    def __init__(
        self, rank: int, num_ranks: int, device: torch.device, backends: Sequence[Backend], deadline_s: float
    ) -> None:
        self._rank, self._num_ranks, self._device = rank, num_ranks, device
        self._upward, self._downward, *self._sums = backends
        self._deadline_s = deadline_s
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self._since_s = running_s()
        """When the message began that is under way."""

    def exchange(self) -> None:
        """Exchange them, each within the deadline."""
        threading.Thread(target=self._run, name="penstock: connects devices", daemon=True).start()
        while not wait_in_parts(self._is_over.wait, PART_S):
            # The message's own wait ends at the deadline too; here is what has not come that far.
            if running_s() - self._since_s > self._deadline_s + PART_S:
                raise RuntimeError(f"a rank did not connect its device within {self._deadline_s:g} s")
        if self._error is not None:
            raise self._error.with_traceback(None)  # its frames hold backends

    def _run(self) -> None:
        try:
            if self._device.index is not None:
                torch.accelerator.set_device_index(self._device.index)  # of this thread
            self._send_and_receive(torch.zeros(1, device=self._device))
        except MessageLate:
            self._error = RuntimeError(f"a first message did not come within {self._deadline_s:g} s")
        except BaseException as error:
            self._error = error
        self._is_over.set()

    def _send_and_receive(self, number: torch.Tensor) -> None:
        for source, destination in permutations(range(self._num_ranks), 2):
            backend = self._upward if source < destination else self._downward
            self._since_s = running_s()
            if self._rank == source:
                QueuedMessage(backend.send([number], destination, Tag.DATA), number).wait(self._deadline_s)
            elif self._rank == destination:
                QueuedMessage(backend.recv([number], source, Tag.DATA), number).wait(self._deadline_s)
        for backend in self._sums:
            self._since_s = running_s()
            QueuedMessage(backend.allreduce([number]), number).wait(self._deadline_s)
