"""A wish that training stops, from a signal: it is fulfilled between two steps, when a checkpoint can be saved."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event


class StopRequest:
    """Tells the training loop of this process that it should stop; any thread may ask."""

    def __init__(self) -> None:
        self._requested = Event()
        self._limit_s: float | None = None

    @property
    def is_requested(self) -> bool:
        return self._requested.is_set()

    @property
    def limit_s(self) -> float | None:
        """How long the loop may take to stop; None where no loop looks, so that the process has to be ended."""
        return self._limit_s

    def request(self) -> None:
        self._requested.set()

    @contextmanager
    def watched(self, limit_s: float) -> Iterator[None]:
        """Promise to look at the wish between steps, and to stop within so long, while the block lasts."""
        self._limit_s = limit_s
        try:
            yield
        finally:
            self._limit_s = None
