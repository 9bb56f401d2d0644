"""`Throttle`: bounds how far a host is ahead of its device, and knows what the device has not ended.

    limit 2    F0 F1 F2 (waits for the end of F0 on the device) F3 (of F1) ...

Work on a GPU is queued, and its memory is taken when it is queued, not when it runs. So a host far ahead holds memory
that nothing uses yet, and cuts the allocator's into pieces. Where computations end before they return, as on a CPU,
there is nothing to bound.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from penstock.errors import DeadlineExceeded, PenstockError
from penstock.execute.accelerator import has_events, is_queued, make_event
from penstock.execute.lost_device import has_failed
from penstock.execute.observing.observer import Around, Observer
from penstock.execute.step import Bound, Step
from penstock.execute.transport.device_queue import WaitForDevice, waiting_of
from penstock.execute.transport.links import never
from penstock.execute.transport.protocol import Transport
from penstock.ir.operations import IS_COMPUTE
from penstock.ir.program import Program


@dataclass(eq=False)
class Throttle(Observer):
    """Lets at most `_limit` computations of one rank be queued and not ended."""

    _limit: int
    _make_marker: Callable[[], torch.Event]
    _await: WaitForDevice
    _has_failed: Callable[[], bool] = never
    """Returns whether the device runs nothing any more."""
    _pending: deque[tuple[int, torch.Event]] = field(default_factory=deque)
    """Row and end of each computation that has been queued."""
    _current_row: int | None = None
    """Row of the computation that is being queued."""

    def begin(self, step: Step) -> None:
        self._pending.clear()  # of an earlier step that failed
        self._current_row = None

    def around(self, program: Program, bound: Bound) -> Around | None:
        computes = bound.awaits is None and IS_COMPUTE[program.op[bound.row]]
        first_row = max(row for row in program.offsets.tolist() if row <= bound.row)
        return partial(self._holding_back, bound.row - first_row) if computes else None

    def rows_of(self, error: BaseException) -> list[int]:
        """Return the rows of the computations that an error may come from, counted from the rank's first.

        A device tells its host later, amid another instruction, that a computation has failed. For all other errors the
        list is empty: they come from the instruction that the host runs.
        """
        unended_rows = [row for row, _ in self._pending]
        if isinstance(error, DeadlineExceeded):
            return unended_rows[:1] if error.peer is None else []
        if isinstance(error, PenstockError) or not self._has_failed():
            return []
        return [*unended_rows, *([] if self._current_row is None else [self._current_row])]

    @contextmanager
    def _holding_back(self, row: int, step: Step) -> Iterator[None]:
        while len(self._pending) >= self._limit:
            self._await(self._pending[0][1].query)
            self._pending.popleft()
        self._current_row = row
        yield
        marker = self._make_marker()
        marker.record()
        self._pending.append((row, marker))
        self._current_row = None


def throttle_for(device: torch.device, limit: int | None, transport: Transport) -> Throttle | None:
    """Return what bounds the host's lead on a device; None where nothing is to be bounded, or no event tells it."""
    if limit is None or not (is_queued(device) and has_events(device)):
        return None
    return Throttle(limit, partial(make_event, device), waiting_of(transport), partial(has_failed, device))
