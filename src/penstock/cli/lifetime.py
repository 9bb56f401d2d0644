"""When a process ends: a rank as soon as it is told to or its launcher is gone, a command on an interrupt.

Child processes that were told to end and do not, such as stopped ones, are killed.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from penstock.cli.status import ExitStatus
from penstock.train.stopping import StopRequest

GRACE_S = 0.7
"""Seconds that a rank may take after SIGTERM to finish reporting a failure of its own."""
SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux."""
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_S = 0.1
TERMINATE_BIT = 1 << (signal.SIGTERM - 1)

Handler = Callable[[int, FrameType | None], None]


def leave_at_once(number: int, frame: FrameType | None) -> None:
    """Handle an interrupt while nothing has been made that would have to be tidied up, such as during imports."""
    os._exit(ExitStatus.INTERRUPTED)


@contextmanager
def interrupts_handled_by(handler: Handler) -> Iterator[None]:
    """Handle SIGINT, SIGTERM and SIGHUP (unless ignored, as under nohup) by `handler`; call from the main thread."""
    earlier_handlers = {number: signal.getsignal(number) for number in INTERRUPTS}
    for number in INTERRUPTS:
        if number != signal.SIGHUP or earlier_handlers[number] != signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in earlier_handlers.items():
            signal.signal(number, previous)


def stop_or_raise(stop: StopRequest | None) -> Handler:
    """Return a handler that asks the training loop to stop, and raises the second time, or where no loop runs."""

    def handle(number: int, frame: FrameType | None) -> None:
        if stop is None or stop.limit_s is None or stop.is_requested:
            raise KeyboardInterrupt
        stop.request()
        threading.Thread(target=_leave_after, args=(stop.limit_s,), name="penstock-end", daemon=True).start()

    return handle


def _leave_after(limit_s: float) -> None:
    time.sleep(limit_s)
    os._exit(ExitStatus.INTERRUPTED)


def end_when_told(stop: StopRequest | None = None) -> None:
    """End this process on SIGTERM within `GRACE_S`, on SIGINT and SIGHUP at once, also amid a wait in C++ code.

    While a loop looks at `stop`, SIGTERM and SIGINT ask it to stop instead, and end the process when its limit is over.

    Python runs signal handlers in the main thread alone, between two steps of Python; hence the default action, and a
    thread that takes SIGTERM. Call before any other thread starts: threads inherit the block.
    """
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_DFL)
    awaited_signals = {signal.SIGTERM} if stop is None else {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited_signals)
    threading.Thread(target=_take_interrupt, args=(awaited_signals, stop), name="penstock-end", daemon=True).start()


def _take_interrupt(awaited_signals: set[signal.Signals], stop: StopRequest | None) -> None:
    number = signal.sigwait(awaited_signals)
    if stop is not None and stop.limit_s is not None:
        stop.request()
        _leave_after(stop.limit_s)
    if number == signal.SIGTERM:
        time.sleep(GRACE_S)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)


def run_id_of(launcher: int) -> str:
    """Return the run id by which a rank knows its launcher's process."""
    return f"penstock-{launcher}"


def launcher_of(environment: Mapping[str, str]) -> int | None:
    """Return the process id of the Penstock launcher that started this rank; None where something else did."""
    name, _, process = environment.get("TORCHELASTIC_RUN_ID", "").rpartition("-")
    return int(process) if name == "penstock" and process.isdecimal() else None


def die_with(launcher: int) -> None:
    """End this process as soon as `launcher`, its parent, has ended, however it ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    else:
        threading.Thread(target=leave_after, args=(launcher,), name="penstock-parent", daemon=True).start()
    if os.getppid() != launcher:
        os._exit(ExitStatus.INTERRUPTED)


def leave_after(launcher: int, *, poll_s: float = 0.5) -> None:
    """Wait until `launcher` is no longer this process's parent, then end this process."""
    while os.getppid() == launcher:
        time.sleep(poll_s)
    os._exit(ExitStatus.INTERRUPTED)


def end_stragglers(processes: Callable[[], Sequence[int]], over: threading.Event, *, max_wait_s: float) -> None:
    """Until `over` is set, kill those of the child processes whose SIGTERM has waited to be taken for `max_wait_s`.

    A running process takes the signal at once, so only a stopped one keeps it waiting. Where the system has no /proc,
    this ends nothing.
    """
    waiting_since_s: dict[int, float] = {}
    while not over.wait(POLL_S):
        now_s = time.monotonic()
        untaken = [process for process in processes() if _has_untaken_signal(process)]
        waiting_since_s = {process: waiting_since_s.get(process, now_s) for process in untaken}
        for process, since_s in waiting_since_s.items():
            if now_s - since_s >= max_wait_s:
                os.kill(process, signal.SIGKILL)


def _has_untaken_signal(process: int) -> bool:
    with suppress(OSError):  # the process has ended, or the system has no such file
        for line in Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("ShdPnd:"):
                return bool(int(line.split()[1], 16) & TERMINATE_BIT)
    return False
