"""Work that may take any time, such as that of a disk, while the ranks keep each other informed.

    own thread        ── works ──────────────────────────────► over
    rank              ── waits ──► gather: all over? ──► waits ──► gather: all over!

So no wait nears the deadline, and a rank that is lost is still noticed within it.
Guarantees: the work sends no message, and all ranks end a wait in the same gather.
Relies on: what the work of a thread changes is not used before it is over.
"""

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from threading import Thread
from typing import TypeVar, cast

from penstock.execute.control.collectives import Control, FailsAs
from penstock.running_time import running_s, wait_in_parts

T = TypeVar("T")
GATHERS_PER_LIMIT = 4


@dataclass(slots=True, eq=False)
class Heartbeat:
    """Counts how often the work of this rank has said that it goes on."""

    count: int = 0
    is_stopped: bool = False

    def beat(self) -> None:
        """Say that the work goes on. Raises: KeyboardInterrupt, where the rank waits for the work no more."""
        if self.is_stopped:
            raise KeyboardInterrupt
        self.count += 1


def run_in_thread(action: Callable[[], T], name: str = "penstock-work") -> Future[T]:
    """Run an action in a daemon thread, so that the process can end while a broken disk blocks the thread."""
    future: Future[T] = Future()

    def complete_future() -> None:
        try:
            result = action()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    Thread(target=complete_future, name=name, daemon=True).start()
    return future


def wait_together(control: Control, future: Future[T], *, limit_s: float, heartbeat: Heartbeat | None = None) -> bool:
    """Wait until the work of every rank is over, and return whether it is. Every rank calls it.

    False means that a rank has waited for `limit_s`; with heartbeats, since the last beat of any rank.

    Raises: PipelineError where a rank is lost; never what the work raised.
    """
    heartbeat = heartbeat or Heartbeat()
    last_counts = [0] * control.num_ranks
    end_s = running_s() + limit_s
    while True:
        remaining_s = end_s - running_s()
        part_s = min(control.limit_s / GATHERS_PER_LIMIT, remaining_s)
        wait_in_parts(lambda timeout_s: wait([future], timeout=timeout_s).done, part_s)
        reports = control.all_gather_object([future.done(), heartbeat.count, remaining_s <= 0])
        are_over, counts, are_late = zip(*cast("list[list[int]]", reports), strict=True)
        if all(are_over):
            return True
        if list(counts) != last_counts:
            last_counts, end_s = list(counts), running_s() + limit_s
        elif any(are_late):
            return False


def work_together(
    control: Control,
    work: Callable[[], T],
    *,
    limit_s: float,
    stalled: Exception,
    fails_as: FailsAs,
    heartbeat: Heartbeat | None = None,
) -> T:
    """Run `work` in a thread on every rank until all ranks' work is over; return this rank's result.

    Every rank calls this function, with work that may take long, such as writing to a disk. The ranks look after each
    other meanwhile, so a rank that is lost is noticed within the deadline of the control channel. A work that is given
    a heartbeat calls its `beat` as it goes on; then `limit_s` counts from the last beat of any rank, and the work is
    told to stop (`beat` raises KeyboardInterrupt) if this wait fails or is interrupted.

    Raises:
        Exception: on every rank: `stalled`, where the work of some rank takes longer than `limit_s` seconds; or, where
            it fails on some rank, the error that `fails_as` makes of the failure.
        PipelineError: a rank is lost.
    """
    future = run_in_thread(work)
    try:
        if not wait_together(control, future, limit_s=limit_s, heartbeat=heartbeat):
            raise stalled
    except BaseException:
        if heartbeat is not None:
            heartbeat.is_stopped = True
            # The work ends at its next beat; a disk that hangs may keep it from beating, so the wait has a limit.
            wait([future], timeout=control.limit_s)
        raise

    def raise_own_failure() -> None:
        future.result()

    # All ranks' work is over. Where it has failed on any of them, this raises on all of them.
    control.together(raise_own_failure, fails_as)
    return future.result()
