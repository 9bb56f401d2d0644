"""Saving and loading together: an error of one rank, or a disk that stalls, becomes one CheckpointError on all."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from penstock.errors import CheckpointError, PenstockError
from penstock.execute.control.collectives import Control, FailsAs, Failure
from penstock.execute.control.long_work import work_together
from penstock.execute.transport.rank_names import RankNames

T = TypeVar("T")
STALLED_AFTER_S = 1800.0
"""Seconds that any write or read may take, beside the time for its bytes."""
SLOWEST_BYTES_PER_S = 1_000_000
"""Bytes per second below which a disk counts as broken."""


def failing_as(error_type: type[CheckpointError]) -> FailsAs:
    """Return a function that makes an error of this type of a failure, on every rank.

    On the rank that failed, an error that is no PenstockError stays as it is: it is a bug.
    """

    def error_of(failure: Failure) -> Exception:
        local_error = failure.local_error
        if local_error is None:  # another rank failed, which is known by its name and words only
            return error_type(f"{failure.name}: {failure.words}")
        if isinstance(local_error, PenstockError) and not isinstance(local_error, error_type):
            return error_type(str(local_error))
        return local_error

    return error_of


def require_equal_on_ranks(argument: str, values: Sequence[object], folder: object, names: RankNames) -> None:
    """Refuse an argument that is not the same on all ranks; `values` has that of each rank.

    Raises: CheckpointError, the same on every rank.
    """
    odd_ranks = [rank for rank, value in enumerate(values) if value != values[0]]
    if odd_ranks:
        raise CheckpointError(
            f"{folder}: {names[odd_ranks[0]]} has another {argument} than {names[0]}; pass the same to all ranks"
        )


def longest_s(num_bytes: int) -> float:
    """Return how many seconds a disk may take for so many bytes before it counts as broken."""
    return STALLED_AFTER_S + num_bytes / SLOWEST_BYTES_PER_S


def run_together(
    control: Control,
    action: Callable[[], T],
    *,
    num_bytes: int,
    path: Path,
    error_type: type[CheckpointError] = CheckpointError,
) -> T:
    """Run an action on every rank in a thread until all are over, and return its result. Every rank calls it.

    `num_bytes` are those that the action reads or writes, `path` is the file or folder that messages name.

    Raises:
        CheckpointError: of `error_type`, on every rank: the action failed on one, or a disk does not answer.
        PipelineError: a rank is lost.
        Exception: what the action raised on this rank, if that is no PenstockError.
    """
    limit_s = longest_s(num_bytes)
    stalled = error_type(f"{path}: a disk took more than {limit_s:.0f} s. See to the file system of the folder")
    return work_together(control, action, limit_s=limit_s, stalled=stalled, fails_as=failing_as(error_type))
