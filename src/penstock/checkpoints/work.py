"""Work that threads do for the disk while the ranks wait for it: how long a disk may take, and what is raised then."""

from collections.abc import Callable
from typing import TypeVar

from penstock.checkpoints.agreement import failing_as
from penstock.errors import CheckpointError
from penstock.execute.control.collectives import Control
from penstock.execute.control.long_work import work_together

T = TypeVar("T")
STALLED_AFTER_S = 1800.0
"""How long a disk may take for nothing, beside the time for what it is given."""
SLOWEST_BYTES_PER_S = 1_000_000


def longest_s(num_bytes: int) -> float:
    """Return after how many seconds a disk that was given so many bytes counts as broken."""
    return STALLED_AFTER_S + num_bytes / SLOWEST_BYTES_PER_S


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
    limit_s = longest_s(num_bytes)
    stalled = error_type(f"{what}: a disk took more than {limit_s:.0f} s. See to the file system of the folder")
    return work_together(control, action, limit_s=limit_s, stalled=stalled, fails_as=failing_as(error_type))
