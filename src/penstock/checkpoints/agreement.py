"""Saving and loading together: an error of one rank, or a disk that stalls, becomes one CheckpointError on all."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.errors import CheckpointError, PenstockError
from penstock.execute.control.collectives import Control, FailsAs, Failure
from penstock.execute.control.long_work import work_together
from penstock.execute.transport.rank_names import RankNames

T = TypeVar("T")
STALLED_AFTER_S = 1800.0
"""How long a disk may take for nothing, beside the time for what it is given."""
SLOWEST_BYTES_PER_S = 1_000_000


def failing_as(error_type: type[CheckpointError]) -> FailsAs:
    """Return what makes one of this type of a failure, on every rank; on a rank with a bug, its error stays."""

    def error_of(failure: Failure) -> Exception:
        own = failure.own
        if own is None:
            return error_type(f"{failure.name}: {failure.words}")
        is_other = isinstance(own, PenstockError) and not isinstance(own, error_type)
        return error_type(str(own)) if is_other else own

    return error_of


def require_equal_on_ranks(what: str, values: Sequence[object], folder: object, names: RankNames) -> None:
    """Refuse what must be the same on all ranks and is not. Raises: CheckpointError, the same on every rank."""
    odd = [rank for rank, value in enumerate(values) if value != values[0]]
    if odd:
        raise CheckpointError(
            f"{folder}: {names[odd[0]]} has another {what} than {names[0]}; pass the same to all ranks"
        )


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
