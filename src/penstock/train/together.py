"""Failing together: what stops one rank stops all of them, with the same words. Long work of one does not stop any."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from penstock.checkpoints.work import run_in_thread
from penstock.errors import PenstockError
from penstock.execute.control.collectives import Control
from penstock.execute.transport.protocol import Transport
from penstock.running_time import running_s, wait_in_parts


@contextmanager
def failing_together(transport: Transport) -> Iterator[None]:
    """Run the block on every rank; where it fails on any, fail on all. A collective at the block's end.

    Raises:
        PenstockError: on every rank; its own on a rank that failed, elsewhere one with the first failed rank's words.
    """
    problem: PenstockError | None = None
    try:
        yield
    except PenstockError as error:
        problem = error
    texts = [str(text) for text in Control(transport).all_gather_object("" if problem is None else str(problem))]
    if problem is not None:
        raise problem
    if any(texts):
        raise PenstockError(next(text for text in texts if text))


T = TypeVar("T")
Beat = Callable[[], None]
"""Says that work goes on; an interruption of the rank's main thread is raised from it."""
GATHERS_PER_LIMIT = 4
STALLED_AFTER_S = 1800.0
"""How long the work of all ranks may go without a beat."""


def working_together(transport: Transport, work: Callable[[Beat], T] | None, *, limit_s: float) -> T | None:
    """Run work that may take any time on some ranks, while all ranks wait for it; every rank calls it.

    The work runs in a thread and calls its argument as it goes on. Meanwhile the ranks gather, each time within
    `limit_s`, so that a rank that is lost is noticed.

    Raises:
        PenstockError: on every rank, as `failing_together`; or where no rank's work has gone on for half an hour.
        PeerLost, DeadlineExceeded: a rank is lost.
    """
    if transport.num_ranks == 1:
        return None if work is None else work(_go_on)
    beats = _Beats()
    ended: Future[T | None] = run_in_thread(partial(work or _nothing, beats.note), name="penstock-work")
    try:
        _wait_for_all(Control(transport, limit_s=limit_s), ended, beats, limit_s / GATHERS_PER_LIMIT)
    except BaseException:
        beats.is_stopped = True
        wait([ended], timeout=limit_s)
        raise
    with failing_together(transport):
        return ended.result()
    return None


@dataclass(slots=True, eq=False)
class _Beats:
    """How often the work of this rank has said that it goes on."""

    count: int = 0
    is_stopped: bool = False

    def note(self) -> None:
        if self.is_stopped:
            raise KeyboardInterrupt
        self.count += 1


def _wait_for_all(control: Control, ended: Future[T], beats: _Beats, pause_s: float) -> None:
    seen: list[object] = []
    changed_s = running_s()
    while True:
        wait_in_parts(lambda part_s: wait([ended], timeout=part_s).done, pause_s)
        told = control.all_gather_object([ended.done(), beats.count])
        if all(isinstance(each, list) and each[0] for each in told):
            return
        if told != seen:
            seen, changed_s = told, running_s()
        # Rank 0's clock alone decides, so that all ranks give up together.
        if control.all_gather_object(running_s() - changed_s > STALLED_AFTER_S)[0]:
            raise PenstockError(f"the text: no rank has read or written any of it for {STALLED_AFTER_S:g} s")


def _go_on() -> None:
    """Do nothing: an interruption reaches the work by itself."""


def _nothing(beat: Beat) -> None:
    """Have no work, as a rank that waits for the others."""
