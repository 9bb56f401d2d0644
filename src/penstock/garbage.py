"""Objects in reference cycles, which Python frees at any time: while something is measured or listed, they stay.

A collection in the middle of a forward frees what earlier ones have left, and the forward would seem to give it back.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class _Holds:
    """The threads of this process that want garbage to stay."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._number = 0
        self._was_collecting = False

    def begin(self) -> None:
        with self._lock:
            if self._number == 0:
                self._was_collecting = gc.isenabled()
                gc.disable()
            self._number += 1

    def end(self) -> None:
        with self._lock:
            self._number -= 1
            if self._number == 0 and self._was_collecting:
                gc.enable()


_HOLDS = _Holds()


@contextmanager
def garbage_left() -> Iterator[None]:
    """Collect no garbage in this process, until the last thread is out of this context."""
    _HOLDS.begin()
    try:
        yield
    finally:
        _HOLDS.end()
