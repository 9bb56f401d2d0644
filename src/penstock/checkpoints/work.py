"""Work that threads do for the disk while the ranks keep each other informed, so that no wait nears the deadline.

    own thread        ── writes ──────────────────────────────► over
    rank              ── waits ──► gather: all over? ──► waits ──► gather: all over!

A disk may take minutes where a step's deadline is seconds. A rank that is lost is still noticed within the deadline.
"""

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import TypeVar

from penstock.checkpoints.agreement import gather_results
from penstock.errors import CheckpointError
from penstock.execute.control.collectives import Control
from penstock.running_time import running_s, wait_in_parts

T = TypeVar("T")
GATHERS_PER_DEADLINE = 4
STALLED_AFTER_S = 1800.0
"""How long a disk may take for nothing, beside the time for what it is given."""
SLOWEST_BYTES_PER_S = 1_000_000


def run_in_thread(action: Callable[[], T], name: str = "penstock-save") -> Future[T]:
    """Run an action in a daemon thread, so that the process can end while a broken disk blocks the thread."""
    ended: Future[T] = Future()

    def run() -> None:
        try:
            result = action()
        except BaseException as error:
            ended.set_exception(error)
        else:
            ended.set_result(result)

    Thread(target=run, name=name, daemon=True).start()
    return ended


def longest_s(num_bytes: int) -> float:
    """Return after how many seconds a disk that was given so many bytes counts as broken."""
    return STALLED_AFTER_S + num_bytes / SLOWEST_BYTES_PER_S


def wait_together(control: Control, own: Future[T], *, limit_s: float) -> bool:
    """Wait until the work of every rank is over, at most `limit_s`; return whether it is. Every rank calls it.

    Raises: PipelineError where a rank is lost; never what the work raised.
    """
    pause_s = control.transport.deadline_s / GATHERS_PER_DEADLINE
    end_s = running_s() + limit_s
    while True:
        left_s = end_s - running_s()
        wait_in_parts(lambda part_s: wait([own], timeout=part_s).done, min(pause_s, left_s))
        told = control.all_gather_object([own.done(), left_s <= 0])
        if all(is_over for is_over, _ in _pairs(told)):
            return True
        if any(is_late for _, is_late in _pairs(told)):
            return False


def run_together(
    control: Control,
    action: Callable[[], T],
    *,
    num_bytes: int,
    what: str,
    error_type: type[CheckpointError] = CheckpointError,
) -> T:
    """Run an action on every rank in a thread until all are over, and return its result. Every rank calls it.

    Raises:
        CheckpointError: of this type, on every rank: the action failed on one, or a disk does not answer.
        PipelineError: a rank is lost.
        Exception: what the action raised on this rank, if that is no PenstockError.
    """
    ended = run_in_thread(action)
    limit_s = longest_s(num_bytes)
    if not wait_together(control, ended, limit_s=limit_s):
        raise error_type(f"{what}: a disk took more than {limit_s:.0f} s. See to the file system of the folder")

    def require() -> None:
        ended.result()

    gather_results(control, require, error_type)
    return ended.result()


def _pairs(told: list[object]) -> list[tuple[bool, bool]]:
    return [(bool(each[0]), bool(each[1])) for each in told if isinstance(each, list)]
