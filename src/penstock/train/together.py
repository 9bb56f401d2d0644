"""Failing together: what stops one rank stops all of them, with the same words. Long work of one does not stop any."""

from collections.abc import Callable
from typing import TypeVar

from penstock.errors import PeerLost, PenstockError
from penstock.execute.control.collectives import Control, Failure
from penstock.execute.control.long_work import Heartbeat, work_together

T = TypeVar("T")
Beat = Callable[[], None]
"""A function by which work says that it goes on; an interruption of the rank's main thread is raised from it."""
STALLED_AFTER_S = 1800.0
"""Seconds that the work of all ranks may go without a beat."""


def same_words(failure: Failure) -> Exception:
    """Return an error with the words of the rank that failed, so that they are printed once; a bug it reports alone."""
    if failure.local_error is not None:
        return failure.local_error
    if failure.is_expected:
        return PenstockError(failure.text)
    return PeerLost(f"rank {failure.rank} failed: {failure.words}", rank=failure.rank)


def working_together(control: Control, work: Callable[[Beat], T] | None) -> T | None:
    """Run work that may take any time on some ranks, while all ranks wait for it; every rank calls it.

    The work runs in a thread and calls its argument as it goes on. Meanwhile the ranks gather, each time within the
    limit of `control`, so that a rank that is lost is noticed.

    Raises:
        PenstockError: on every rank, as `same_words`; or where no rank's work has gone on for half an hour.
        PeerLost, DeadlineExceeded: a rank is lost.
    """
    if control.num_ranks == 1:
        # An interruption reaches the work by itself.
        return None if work is None else work(lambda: None)
    heartbeat = Heartbeat()
    return work_together(
        control,
        lambda: None if work is None else work(heartbeat.beat),
        limit_s=STALLED_AFTER_S,
        stalled=PenstockError(f"the text: no rank has read or written any of it for {STALLED_AFTER_S:g} s"),
        fails_as=same_words,
        heartbeat=heartbeat,
    )
