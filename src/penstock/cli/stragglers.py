"""End child processes that were told to end and do not, such as stopped ones."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

POLL_S = 0.1
TERMINATE_BIT = 1 << (signal.SIGTERM - 1)


def end_stragglers(processes: Callable[[], Sequence[int]], over: threading.Event, *, patience_s: float) -> None:
    """Until `over` is set, kill those of the child processes whose SIGTERM has waited to be taken for `patience_s`.

    A running process takes the signal at once, so only a stopped one keeps it waiting. Where the system has no /proc,
    this ends nothing.
    """
    waiting_since_s: dict[int, float] = {}
    while not over.wait(POLL_S):
        now_s = time.monotonic()
        untaken = [process for process in processes() if _has_untaken_signal(process)]
        waiting_since_s = {process: waiting_since_s.get(process, now_s) for process in untaken}
        for process, since_s in waiting_since_s.items():
            if now_s - since_s >= patience_s:
                os.kill(process, signal.SIGKILL)


def _has_untaken_signal(process: int) -> bool:
    with suppress(OSError):  # the process has ended, or the system has no such file
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("ShdPnd:"):
                return bool(int(line.split()[1], 16) & TERMINATE_BIT)
    return False
