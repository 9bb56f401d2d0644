"""Places in a device's queue: waiting until the device has come to one, and bounding how far its host is ahead.

    limit 2    F0 F1 F2 (waits for the end of F0 on the device) F3 (of F1) ...

Work on a GPU is queued, and its memory is taken when it is queued, not when it runs. So a host far ahead holds memory
that nothing uses yet, and cuts the allocator's into pieces. Where computations end before they return, as on a CPU,
there is nothing to bound.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch

from penstock.errors import DeadlineExceeded
from penstock.execute.observing.observer import Around, Observer
from penstock.execute.step import Bound, Step
from penstock.ir.operations import IS_COMPUTE
from penstock.ir.program import Program

PAUSE_S = 50e-6


class Marker(Protocol):
    """A place in a device's queue, such as `torch.cuda.Event`."""

    def record(self) -> None:
        """Put it behind all that is queued."""
        ...

    def query(self) -> bool:
        """Whether the device has come to it."""
        ...


def await_marker(
    marker: Marker,
    *,
    rank: int,
    deadline_s: float,
    read_clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Let the host wait until the device has come to a marker. Raises: DeadlineExceeded."""
    begin_s = read_clock()
    while not marker.query():
        waited_s = read_clock() - begin_s
        if waited_s > deadline_s:
            raise DeadlineExceeded(
                f"rank {rank}: waited {waited_s:.2f} s for its device to end a computation, the deadline is "
                f"{deadline_s:g} s. Find out what the device waits for, or allow more time",
                rank=rank,
                waited_s=waited_s,
            )
        pause(PAUSE_S)


class Throttle(Observer):
    """Lets at most `limit` computations of one rank be queued and not ended."""

    def __init__(
        self,
        limit: int,
        make_marker: Callable[[], Marker],
        *,
        rank: int = 0,
        deadline_s: float = 60.0,
        read_clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._limit = limit
        self._make_marker = make_marker
        self._await = partial(await_marker, rank=rank, deadline_s=deadline_s, read_clock=read_clock, pause=pause)
        self._pending: deque[Marker] = deque()

    def begin(self, step: Step) -> None:
        self._pending.clear()  # of an earlier step that failed

    def around(self, program: Program, bound: Bound) -> Around | None:
        computes = bound.receive_row is None and IS_COMPUTE[program.op[bound.row]]
        return self._holding_back if computes else None

    @contextmanager
    def _holding_back(self, step: Step) -> Iterator[None]:
        while len(self._pending) >= self._limit:
            self._await(self._pending.popleft())
        yield
        marker = self._make_marker()
        marker.record()
        self._pending.append(marker)


def throttle_for(device: torch.device, limit: int | None, *, rank: int, deadline_s: float) -> Throttle | None:
    """Return what bounds the host's lead on a device; None where nothing is to be bounded."""
    if limit is None or device.type != "cuda":
        return None
    return Throttle(limit, torch.cuda.Event, rank=rank, deadline_s=deadline_s)
