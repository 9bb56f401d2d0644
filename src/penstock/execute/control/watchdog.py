"""A thread that shows a slow rank's Python stack to the other ranks, and looks at what may block the rank.

A rank that hangs cannot say where. Its watchdog can: once an instruction has lasted a quarter of the deadline, the
stack of the rank's thread goes to the position board, in time for the peers, whose own waits end at the deadline.
Long before, `unblock` is called again and again: a host that its device blocks notices nothing by itself.

Guarantees: no error in it ends a step, and it ends with its process or with `stop`. Relies on: the instruction leaves
Python's lock to other threads from time to time; one that keeps it, as in a call into C, shows no stack.
"""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from traceback import walk_stack

from penstock.execute.control.positions import PositionBoard, State

SLOW_PART = 0.25
LOOKS_PER_DEADLINE = 16
LONGEST_PAUSE_S = 1.0
LONGEST_STOP_S = 0.5


@dataclass(eq=False)
class Watchdog:
    """Watches the rank on whose thread `start` was called."""

    board: PositionBoard
    deadline_s: float
    unblock: Callable[[], object] = bool
    clock: Callable[[], float] = time.monotonic
    _is_over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _watched_thread: int = 0

    def __post_init__(self) -> None:
        self._pause_s = min(self.deadline_s / LOOKS_PER_DEADLINE, LONGEST_PAUSE_S)

    def start(self) -> None:
        """Watch the calling thread from now on, instead of the one before it."""
        self._watched_thread = threading.get_ident()
        if self._thread is not None and self._thread.is_alive():  # not after a fork, or an error in it
            return
        self._is_over.clear()
        # A daemon: a process whose main thread ends must not wait for the next look.
        self._thread = threading.Thread(target=self._watch, name=f"watchdog of rank {self.board.rank}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch; does nothing if there is none."""
        if self._thread is None:
            return
        self._is_over.set()
        if self._thread is not threading.current_thread():  # which collects the garbage of a dropped pipeline, too
            self._thread.join(LONGEST_STOP_S)
        self._thread = None

    def look(self) -> None:
        """Write the watched thread's stack onto the board if its instruction is slow, and have it unblocked."""
        position = self.board.read(self.board.rank)
        is_busy = position.state in (State.RUNNING, State.WAITING, State.COMPILING)
        lasted_s = self.clock() - position.since_s
        if is_busy and lasted_s > self._pause_s:
            self.unblock()
        if is_busy and lasted_s > SLOW_PART * self.deadline_s:
            self.board.note_stack(stack_of(self._watched_thread))
        elif position.stack:
            self.board.note_stack("")

    def _watch(self) -> None:
        while not self._is_over.wait(self._pause_s):
            # A diagnosis must not break the run. The rank's own thread hears too when a device has failed.
            with suppress(OSError, ValueError, RuntimeError):
                self.look()


def stack_of(thread: int) -> str:
    """Return the Python stack of a thread (its `threading.get_ident()`), innermost call first; empty if it is over."""
    calls = walk_stack(frame) if (frame := sys._current_frames().get(thread)) else ()
    return "\n".join(
        f'  File "{call.f_code.co_filename}", line {line} in {call.f_code.co_name}' for call, line in calls
    )
