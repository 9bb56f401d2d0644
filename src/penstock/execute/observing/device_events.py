"""Places in a device's queue, and waiting until the device has come to one."""

import time
from collections.abc import Callable
from typing import Protocol

from penstock.errors import DeadlineExceeded

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
