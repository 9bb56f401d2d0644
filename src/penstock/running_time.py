"""Time without that in which this process was stopped, as by Ctrl-Z, a scheduler's suspend or a laptop's sleep.

    wait  |--0.5 s--|--0.5 s--|--0.5 s ........ stopped for an hour ........ |--0.5 s--|
                                                the part came an hour late: no rank was waited for in that time

A wait sees it by itself: it waits in short parts, and a part that ends much later than asked was not waited through.
Guarantees: a process that runs counts all of its time. Relies on: whatever may wait long does so through this file.
"""

import time
from collections.abc import Callable
from threading import Lock

LONGEST_PART_S = 0.5
TOLERANCE_S = 0.5
"""By which a part may be late on a busy machine."""


class _Stops:
    """The time in which this process was stopped, as far as its waits have seen it."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._seen_until_s = 0.0
        self._lock = Lock()

    def note(self, due_s: float, now_s: float) -> None:
        """Count the time from `due_s` to `now_s`, once also where several threads have waited through it."""
        with self._lock:
            self.total_s += max(now_s - max(due_s, self._seen_until_s), 0.0)
            self._seen_until_s = max(now_s, self._seen_until_s)


_STOPS = _Stops()


def running_s() -> float:
    """Return `time.monotonic()`, less the time in which a wait of this process was stopped."""
    return time.monotonic() - _STOPS.total_s


def wait_in_parts(wait: Callable[[float], object], limit_s: float) -> bool:
    """Call `wait` with seconds until what it returns is true; return whether it was before the limit.

    It is called once at least, and never with more than `LONGEST_PART_S`. It must not miss what comes just as its time
    is over: `wait_for` of a condition looks once more, `wait` does not.
    """
    end_s = running_s() + limit_s
    part_s = limit_s
    while True:
        part_s = min(max(part_s, 0.0), LONGEST_PART_S)
        due_s = time.monotonic() + part_s
        is_over = wait(part_s)
        now_s = time.monotonic()
        if now_s - due_s > TOLERANCE_S:
            _STOPS.note(due_s, now_s)
        if is_over:
            return True
        part_s = end_s - running_s()
        if part_s <= 0:
            return False


def pause(duration_s: float) -> None:
    """Sleep, at most `LONGEST_PART_S`, and see whether the process was stopped meanwhile."""
    wait_in_parts(_sleep, min(duration_s, LONGEST_PART_S))


def _sleep(duration_s: float) -> bool:
    time.sleep(duration_s)
    return True
