"""Measures when each instruction of a rank starts and ends, and lays the ranks' measurements together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.execute.accelerator import is_queued, make_event
from penstock.execute.control.collectives import Control
from penstock.execute.observing.clock import Alignment, Clock, ClockComparison
from penstock.execute.observing.observer import Around, Observer
from penstock.execute.stages.copy_stream import LaunchedCopy
from penstock.execute.step import Bound, Step
from penstock.execute.transport.device_queue import WaitForDevice, waiting_of
from penstock.ir.measured import HostTimes, ImmediateWeights
from penstock.ir.program import Program
from penstock.ir.timeline import DataWait, Timeline


class Recorder(Observer):
    """Start and end of each row of a rank in one step, in seconds of its clock; here the host itself computes."""

    def __init__(self, rows: range, clock: Clock) -> None:
        self.start_s: NDArray[np.float64] = np.zeros(len(rows))
        self.end_s: NDArray[np.float64] = np.zeros(len(rows))
        self.host = HostTimes(*(np.zeros(len(rows)) for _ in HostTimes._fields))
        self._first = rows.start
        self._read = clock.read

    def around(self, program: Program, bound: Bound) -> Around:
        if bound.awaits is None:
            return partial(self._timing, bound.row - self._first)
        return partial(self._noting_arrival, bound.awaits - self._first)

    @contextmanager
    def _timing(self, row: int, step: Step) -> Iterator[None]:
        self.start_s[row] = self.host.start_s[row] = self._read()
        yield
        self.end_s[row] = self._read()
        for column in self.host[1:]:
            column[row] = self.end_s[row]

    @contextmanager
    def _noting_arrival(self, row: int, step: Step) -> Iterator[None]:
        """The end of a wait is the arrival of the message whose receive was posted earlier."""
        self.host.wait_start_s[row] = self._read()
        yield
        self.end_s[row] = self.host.wait_end_s[row] = self._read()


class DeviceRecorder(Recorder):
    """Start and end of each row on an accelerator, where the host only queues work: by events in the device's queue.

    Waits of the host are the host's time. A step begins once the device has nothing more to do.
    """

    def __init__(self, rows: range, clock: Clock, make_event: Callable[[], torch.Event], wait: WaitForDevice) -> None:
        super().__init__(rows, clock)
        self._make_event, self._await = make_event, wait
        self._events: dict[int, tuple[torch.Event, torch.Event]] = {}
        self._copies: list[int] = []
        """Rows whose copies run on a stream of their own, in the order of that stream."""

    def begin(self, step: Step) -> None:
        # The event is made here, and not earlier: an error that a device without such events raises here drops the
        # recording alone, and the step goes on.
        self._origin = self._make_event()
        self._origin.record()
        self._await(self._origin.query)
        self._origin_s = self._read()

    @contextmanager
    def _timing(self, row: int, step: Step) -> Iterator[None]:
        start, end = self._make_event(), self._make_event()
        start.record()
        self.host.start_s[row] = self._read()
        yield
        returned_s = self._read()
        for column in self.host[1:]:
            column[row] = returned_s
        copy_stream = _copy_stream_of(step, self._first + row)
        if copy_stream is None:
            end.record()
        else:
            end.record(copy_stream)
            self._copies.append(row)
        self._events[row] = start, end

    @contextmanager
    def _noting_arrival(self, row: int, step: Step) -> Iterator[None]:
        is_copy = _copy_stream_of(step, self._first + row) is not None
        self.host.wait_start_s[row] = self._read()
        yield
        self.host.wait_end_s[row] = self._read()
        if not is_copy:  # whose end an event tells, since the host goes on at once
            self.end_s[row] = self.host.wait_end_s[row]

    def end(self, step: Step, failed: bool) -> None:
        for row, (start, end) in () if failed else self._events.items():
            self._await(end.query)
            start_s, arrival_s = self._time_s(start), float(self.end_s[row])
            # The end of a receive is its arrival, which the host saw, maybe before the device came to its posting.
            self.start_s[row] = min(start_s, arrival_s) if arrival_s else start_s
            self.end_s[row] = arrival_s or self._time_s(end)
        # A copy begins when the current stream has come to it, and the copy before it on its stream has ended.
        for earlier, row in () if failed else pairwise(self._copies):
            self.start_s[row] = max(self.start_s[row], self.end_s[earlier])
        self._events.clear()
        self._copies.clear()

    def _time_s(self, event: torch.Event) -> float:
        return self._origin_s + self._origin.elapsed_time(event) * 1e-3


def _copy_stream_of(step: Step, row: int) -> torch.Stream | None:
    """Return the stream on which a row has launched a copy that nobody waits for yet; None of other rows."""
    launched = None if step is None else step.tickets.get(row)
    return launched.stream if isinstance(launched, LaunchedCopy) else None


def recorder_for(clocks: ClockComparison, rows: range) -> Recorder:
    """Return what measures a step on the device of this rank."""
    if not is_queued(clocks.device):
        return Recorder(rows, clocks.clock)
    wait, make = waiting_of(clocks.transport, has_peers=False), partial(make_event, clocks.device, timing=True)
    return DeviceRecorder(rows, clocks.clock, make, wait)


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A measured step, on every rank alike but for `rank`."""

    timeline: Timeline
    message_bytes: tuple[int, ...]
    """[num_stages] bytes of each stage's output; 0 for a last stage."""
    early_weights: Mapping[int, ImmediateWeights]
    """The weight gradients that are computed in I, by each stage whose backwards are split."""
    rank: int
    alignment: Alignment
    origin_s: float
    """Seconds of rank 0's clock at which the timeline is 0."""

    def from_own_clock(self, time_s: float) -> float:
        """Return the timeline's time at a moment that this rank read off its clock."""
        return float(self.alignment.to_common(self.rank, np.array([time_s]))[0]) - self.origin_s


@dataclass(eq=False)
class StepRecording(Observer):
    """Lays what the recorders of all ranks have measured together, on one clock."""

    needs_all_ranks = True

    program: Program
    recorder: Recorder
    clocks: ClockComparison
    output_bytes: Callable[[], Mapping[int, int]]
    """Returns, after a step, the bytes of the outputs of this rank's stages."""
    early_weights: Callable[[], Mapping[int, ImmediateWeights]]
    """Returns, after a step, the weight gradients that this rank's stages compute in I."""
    recording: Recording | None = None
    """The measurement; None if the recorder of any rank has failed."""

    def begin(self, step: Step) -> None:
        self.clocks.begin()

    def end(self, step: Step, failed: bool) -> None:
        if failed:
            return
        alignment, recorder = self.clocks.end(), self.recorder
        waits = () if step.prefetcher is None else step.prefetcher.waits
        local_measurement = {
            "is_complete": recorder.failure is None,
            "start_s": recorder.start_s.tolist(),
            "end_s": recorder.end_s.tolist(),
            "host": [column.tolist() for column in recorder.host],
            "output_bytes": list(self.output_bytes().items()),
            "early_weights": [
                (stage, astuple(immediate_weights)) for stage, immediate_weights in self.early_weights().items()
            ],
            "data_waits": list(map(astuple, waits)),
        }
        control = Control(self.clocks.transport)
        measurements = cast(list[dict[str, Any]], control.all_gather_object(local_measurement))
        if all(measurement["is_complete"] for measurement in measurements):
            self.recording = self._recording_of_ranks(measurements, alignment)

    def _recording_of_ranks(self, measurements: Sequence[dict[str, Any]], alignment: Alignment) -> Recording:
        """Return one recording of all ranks, with all times on rank 0's clock, counted from the first start.

        `measurements[rank]` is what `end` gathers from a rank: seconds on the clock of that rank, with one start and
        one end for each of its rows. `alignment` says how far the clock of each rank is ahead of rank 0's.
        """
        to_common = alignment.to_common
        # Rows of a program are numbered rank by rank, so the times of all ranks follow each other.
        start_s, end_s = (
            np.concatenate(
                [to_common(rank, np.array(measurement[name])) for rank, measurement in enumerate(measurements)]
            )
            for name in ("start_s", "end_s")
        )
        origin_s = float(start_s.min()) if len(start_s) else 0.0
        host_columns = zip(
            *(
                to_common(rank, np.array(measurement["host"])) - origin_s
                for rank, measurement in enumerate(measurements)
            ),
            strict=True,
        )
        timeline = Timeline(
            self.program,
            "measured",
            start_s - origin_s,
            end_s - origin_s,
            clock_uncertainty_s=alignment.uncertainty_s,
            data_waits=tuple(
                DataWait(rank, microbatch, *(to_common(rank, np.array(times_s)) - origin_s).tolist())
                for measurement in measurements
                for rank, microbatch, *times_s in measurement["data_waits"]
            ),
            host=HostTimes(*map(np.concatenate, host_columns)),
        )
        bytes_of_stage = dict(pair for measurement in measurements for pair in measurement["output_bytes"])
        message_bytes = tuple(bytes_of_stage.get(stage, 0) for stage in range(self.program.num_stages))
        # Weight gradients that a split backward computes together with the input gradients, and not later.
        early_weights = {
            stage: ImmediateWeights(share, tuple(names), reasons)
            for measurement in measurements
            for stage, (share, names, reasons) in measurement["early_weights"]
        }
        return Recording(timeline, message_bytes, early_weights, self.clocks.transport.rank, alignment, origin_s)
