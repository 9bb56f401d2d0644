"""What ranks agree on when they save or load together: an error of one rank becomes one CheckpointError on all."""

from collections.abc import Sequence

from penstock.errors import CheckpointError, PenstockError
from penstock.execute.control.collectives import FailsAs, Failure
from penstock.execute.transport.rank_names import RankNames


def failing_as(error_type: type[CheckpointError]) -> FailsAs:
    """Return what makes one of this type of a failure, on every rank; on a rank with a bug, its error stays."""

    def error_of(failure: Failure) -> Exception:
        own = failure.own
        if own is None:
            return error_type(f"{failure.name}: {failure.words}")
        return error_type(str(own)) if isinstance(own, PenstockError) and not isinstance(own, error_type) else own

    return error_of


def require_equal_on_ranks(what: str, values: Sequence[object], folder: object, names: RankNames) -> None:
    """Refuse what must be the same on all ranks and is not. Raises: CheckpointError, the same on every rank."""
    odd = [rank for rank, value in enumerate(values) if value != values[0]]
    if odd:
        raise CheckpointError(
            f"{folder}: {names[odd[0]]} has another {what} than {names[0]}; pass the same to all ranks"
        )
