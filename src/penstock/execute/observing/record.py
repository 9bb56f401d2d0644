"""Measures when each instruction of a rank starts and ends, and lays the ranks' measurements together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from penstock.execute.calls import Bound, Call, Change, around_each
from penstock.execute.observing.clock import Alignment, Clock, ClockComparison
from penstock.execute.step import Step
from penstock.execute.transport.protocol import Transport
from penstock.ir.program import Program
from penstock.ir.timeline import DataWait, Timeline


class Recorder:
    """Start and end of a rank's rows, in seconds of its clock."""

    def __init__(self, num_rows: int, clock: Clock) -> None:
        self.start_s: NDArray[np.float64] = np.zeros(num_rows)
        self.end_s: NDArray[np.float64] = np.zeros(num_rows)
        self._read = clock.read

    def timed(self, row: int, call: Call) -> Call:
        """Return a call that notes when it starts and ends."""
        start_s, end_s, read = self.start_s, self.end_s, self._read

        def timed_call(step: Step) -> None:
            start_s[row] = read()
            call(step)
            end_s[row] = read()

        return timed_call

    def timed_arrival(self, receive_row: int, call: Call) -> Call:
        """Return a wait that notes its end as the arrival of the message whose receive was posted earlier."""
        end_s, read = self.end_s, self._read

        def timed_wait(step: Step) -> None:
            call(step)
            end_s[receive_row] = read()

        return timed_wait

    def change(self, first_row: int) -> Change:
        """Return the change that measures every call of a rank whose rows begin with this one."""

        def wrap(bound: Bound) -> Call:
            if bound.receive_row is not None:
                return self.timed_arrival(bound.receive_row - first_row, bound.call)
            return self.timed(bound.row - first_row, bound.call)

        return around_each(wrap)

    def finish(self) -> None:
        """Make sure that all times are there."""


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A measured step, on every rank alike but for `rank`."""

    timeline: Timeline
    message_bytes: tuple[int, ...]
    """[num_stages] bytes of each stage's output; 0 for a last stage."""
    rank: int
    alignment: Alignment
    origin_s: float
    """The timeline's 0, on rank 0's clock."""

    def from_own_clock(self, time_s: float) -> float:
        """Return the timeline's time at a moment that this rank read off its clock."""
        return float(self.alignment.to_common(self.rank, np.array([time_s]))[0]) - self.origin_s


def gather_recording(
    transport: Transport,
    program: Program,
    recorder: Recorder,
    comparison: ClockComparison,
    *,
    output_bytes: Mapping[int, int],
    data_waits: Sequence[DataWait] = (),
) -> Recording:
    """Give every rank what all ranks measured, from the first start on, on one clock; a collective.

    `output_bytes` are those of this rank's stages, `data_waits` its own, on its clock.
    """
    alignment = comparison.end()
    sizes = {str(stage): num_bytes for stage, num_bytes in output_bytes.items()}
    own = {
        "start_s": recorder.start_s.tolist(),
        "end_s": recorder.end_s.tolist(),
        "output_bytes": sizes,
        "data_waits": [[wait.microbatch, wait.begin_s, wait.end_s] for wait in data_waits],
    }
    everyone = cast(list[dict[str, Any]], transport.all_gather_object(own))
    start_s, end_s = (
        np.concatenate([alignment.to_common(rank, np.array(row[name])) for rank, row in enumerate(everyone)])
        for name in ("start_s", "end_s")
    )
    origin_s = float(start_s.min()) if len(start_s) else 0.0
    timeline = Timeline(
        program,
        "measured",
        start_s - origin_s,
        end_s - origin_s,
        clock_uncertainty_s=alignment.uncertainty_s,
        data_waits=tuple(
            wait
            for rank, row in enumerate(everyone)
            for wait in _on_timeline(row["data_waits"], rank, alignment, origin_s)
        ),
    )
    bytes_of_stage = {stage: num_bytes for row in everyone for stage, num_bytes in row["output_bytes"].items()}
    message_bytes = tuple(bytes_of_stage.get(str(stage), 0) for stage in range(program.num_stages))
    return Recording(timeline, message_bytes, transport.rank, alignment, origin_s)


def _on_timeline(
    rows: Sequence[tuple[int, float, float]], rank: int, alignment: Alignment, origin_s: float
) -> Iterator[DataWait]:
    """A rank's waits for data, as microbatch, begin and end on its clock, at the timeline's times."""
    for microbatch, *times_s in rows:
        begin_s, end_s = (alignment.to_common(rank, np.array(times_s)) - origin_s).tolist()
        yield DataWait(rank, microbatch, begin_s, end_s)
