"""Measures when each instruction of a rank starts and ends, and lays the ranks' measurements together."""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from penstock.execute.transport.protocol import Transport
from penstock.ir.program import Program
from penstock.ir.timeline import Timeline

Call = Callable[[], None]


class Recorder:
    """Start and end of a rank's rows, in seconds of the monotonic clock, which all processes of a host share."""

    def __init__(self, num_rows: int) -> None:
        self.start_s: NDArray[np.float64] = np.zeros(num_rows)
        self.end_s: NDArray[np.float64] = np.zeros(num_rows)

    def timed(self, row: int, call: Call) -> Call:
        """Return a call that notes when it starts and ends."""
        start_s, end_s, clock = self.start_s, self.end_s, time.monotonic

        def timed_call() -> None:
            start_s[row] = clock()
            call()
            end_s[row] = clock()

        return timed_call

    def timed_arrival(self, receive_row: int, call: Call) -> Call:
        """Return a wait that notes its end as the arrival of the message whose receive was posted earlier."""
        end_s, clock = self.end_s, time.monotonic

        def timed_wait() -> None:
            call()
            end_s[receive_row] = clock()

        return timed_wait


def gather_timeline(transport: Transport, program: Program, recorder: Recorder) -> Timeline:
    """Give every rank the measured timeline of all ranks, from the first start on; a collective."""
    starts = transport.all_gather_object(recorder.start_s.tolist())
    ends = transport.all_gather_object(recorder.end_s.tolist())
    start_s = np.concatenate([np.array(part, np.float64) for part in starts])
    end_s = np.concatenate([np.array(part, np.float64) for part in ends])
    origin_s = start_s.min(initial=np.inf) if len(start_s) else 0.0
    unknown = np.zeros(program.num_stages, np.int64)
    return Timeline(program, "measured", start_s - origin_s, end_s - origin_s, unknown, unknown)
