"""`Throttle`: bounds how far a host is ahead of its device.

    limit 2    F0 F1 F2 (waits for the end of F0 on the device) F3 (of F1) ...

Work on a GPU is queued, and its memory is taken when it is queued, not when it runs. So a host far ahead holds memory
that nothing uses yet, and cuts the allocator's into pieces. Where computations end before they return, as on a CPU,
there is nothing to bound.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from penstock.execute.accelerator import is_queued, make_event
from penstock.execute.observing.observer import Around, Observer
from penstock.execute.step import Bound, Step
from penstock.execute.transport.device_queue import WaitForDevice, await_device, held_up_of
from penstock.execute.transport.protocol import Transport
from penstock.ir.operations import IS_COMPUTE
from penstock.ir.program import Program


class Throttle(Observer):
    """Lets at most `limit` computations of one rank be queued and not ended."""

    def __init__(self, limit: int, make_marker: Callable[[], torch.Event], wait: WaitForDevice) -> None:
        self._limit = limit
        self._make_marker = make_marker
        self._await = wait
        self._pending: deque[torch.Event] = deque()

    def begin(self, step: Step) -> None:
        self._pending.clear()  # of an earlier step that failed

    def around(self, program: Program, bound: Bound) -> Around | None:
        computes = bound.awaits is None and IS_COMPUTE[program.op[bound.row]]
        return self._holding_back if computes else None

    @contextmanager
    def _holding_back(self, step: Step) -> Iterator[None]:
        while len(self._pending) >= self._limit:
            self._await(self._pending.popleft().query)
        yield
        marker = self._make_marker()
        marker.record()
        self._pending.append(marker)


def throttle_for(device: torch.device, limit: int | None, transport: Transport) -> Throttle | None:
    """Return what bounds the host's lead on a device; None where nothing is to be bounded."""
    if limit is None or not is_queued(device):
        return None
    rank, deadline_s = transport.rank, transport.deadline_s
    wait = partial(await_device, rank=rank, deadline_s=deadline_s, is_held_up=held_up_of(transport))
    return Throttle(limit, partial(make_event, device), wait)
