"""Measures rows on a GPU: by events in the device's queue, since the host only queues what is to run."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from penstock.execute.calls import Call
from penstock.execute.markers import Marker, await_marker
from penstock.execute.observing.clock import Clock
from penstock.execute.observing.record import Recorder
from penstock.execute.step import Step

MILLISECONDS = 1e-3


class TimedEvent(Marker, Protocol):
    """A place in a device's queue that knows when the device came to it."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this event to a later one."""
        ...


class DeviceRecorder(Recorder):
    """Start and end of a rank's rows: when the device came to them. What the host waits for is the host's time.

    Made while the device has nothing to do, or is soon to have done it.
    """

    def __init__(
        self, num_rows: int, clock: Clock, make_event: Callable[[], TimedEvent], *, rank: int, deadline_s: float
    ) -> None:
        super().__init__(num_rows, clock)
        self._make_event = make_event
        self._rank = rank
        self._deadline_s = deadline_s
        self._events: dict[int, tuple[TimedEvent, TimedEvent]] = {}
        self._origin = make_event()
        self._origin.record()
        await_marker(self._origin, rank=rank, deadline_s=deadline_s)
        self._origin_s = clock.read()

    def timed(self, row: int, call: Call) -> Call:
        def timed_call(step: Step) -> None:
            start, end = self._make_event(), self._make_event()
            start.record()
            call(step)
            end.record()
            self._events[row] = start, end

        return timed_call

    def finish(self) -> None:
        for row, (start, end) in self._events.items():
            await_marker(end, rank=self._rank, deadline_s=self._deadline_s)
            start_s, arrival_s = self._time_s(start), float(self.end_s[row])
            # The end of a receive is its arrival, which the host saw, maybe before the device came to its posting.
            self.start_s[row] = min(start_s, arrival_s) if arrival_s else start_s
            self.end_s[row] = arrival_s or self._time_s(end)
        self._events.clear()

    def _time_s(self, event: TimedEvent) -> float:
        return self._origin_s + self._origin.elapsed_time(event) * MILLISECONDS


def recorder_for(device: torch.device, num_rows: int, clock: Clock, *, rank: int, deadline_s: float) -> Recorder:
    """Return what measures a step on this device."""
    if device.type != "cuda":
        return Recorder(num_rows, clock)
    return DeviceRecorder(
        num_rows, clock, partial(torch.cuda.Event, enable_timing=True), rank=rank, deadline_s=deadline_s
    )
