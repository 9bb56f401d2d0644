"""Bounds how far a rank's host runs ahead of its device: a computation starts only when an earlier one has ended.

    limit 2    F0 F1 F2 (waits for the end of F0 on the device) F3 (of F1) ...

Work on a GPU is queued, and its memory is taken when it is queued, not when it runs. So a host far ahead holds memory
that nothing uses yet, and cuts the allocator's into pieces. Where computations end before they return, as on a CPU,
there is nothing to bound.
"""

import time
from collections import deque
from collections.abc import Callable

import torch

from penstock.execute.calls import Bound, Call, Change, around_each
from penstock.execute.markers import Marker, await_marker
from penstock.execute.step import Step
from penstock.ir.program import Program


class Throttle:
    """Lets at most `limit` computations of one rank be queued and not ended."""

    def __init__(
        self,
        limit: int,
        make_marker: Callable[[], Marker],
        *,
        rank: int = 0,
        deadline_s: float = 60.0,
        read_clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._limit = limit
        self._make_marker = make_marker
        self._rank = rank
        self._deadline_s = deadline_s
        self._read_clock = read_clock
        self._pause = pause
        self._pending: deque[Marker] = deque()

    def change(self, program: Program) -> Change:
        """Return the change that holds back the computations of a program, and lets everything else pass."""
        return around_each(
            lambda bound: self._held_back(bound.call) if _computes(program, bound) else bound.call,
        )

    def clear(self) -> None:
        """Forget what is pending, as after a failure."""
        self._pending.clear()

    def _held_back(self, call: Call) -> Call:
        def throttled(step: Step) -> None:
            while len(self._pending) >= self._limit:
                await_marker(
                    self._pending.popleft(),
                    rank=self._rank,
                    deadline_s=self._deadline_s,
                    read_clock=self._read_clock,
                    pause=self._pause,
                )
            call(step)
            marker = self._make_marker()
            marker.record()
            self._pending.append(marker)

        return throttled


def throttle_for(device: torch.device, limit: int | None, *, rank: int, deadline_s: float) -> Throttle | None:
    """Return what bounds the host's lead on a device; None where nothing is to be bounded."""
    if limit is None or device.type != "cuda":
        return None
    return Throttle(limit, torch.cuda.Event, rank=rank, deadline_s=deadline_s)


def _computes(program: Program, bound: Bound) -> bool:
    return bound.receive_row is None and bool(program.is_compute[bound.row])
