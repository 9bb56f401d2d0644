"""What ranks agree on when they save or load together: an error of one rank becomes one CheckpointError on all."""

from collections.abc import Callable, Sequence
from typing import Any

from penstock.errors import CheckpointError, PenstockError
from penstock.execute.control.collectives import Control

_FAILURE, _RESULT = "failure", "result"


def gather_results(
    control: Control, make: Callable[[], Any], error_type: type[CheckpointError] = CheckpointError
) -> list[Any]:
    """Return what `make` returned on every rank, plain values; every rank calls it.

    Raises:
        CheckpointError: of this type, on every rank: with this rank's words, else those of the first that failed.
        Exception: one of this rank's `make` that is no PenstockError, once the others know of it.
    """
    failure: Exception | None = None
    try:
        told: dict[str, Any] = {_RESULT: make()}
    except Exception as error:  # whatever it is, the other ranks must hear of it
        failure, told = error, {_FAILURE: _words(error)}
    everyone: list[Any] = control.all_gather_object(told)
    if isinstance(failure, PenstockError) and not isinstance(failure, error_type):
        raise error_type(str(failure)) from failure
    if failure is not None:
        raise failure
    for rank, theirs in enumerate(everyone):
        if _FAILURE in theirs:
            raise error_type(f"rank {rank}: {theirs[_FAILURE]}")
    return [theirs[_RESULT] for theirs in everyone]


def require_equal_on_ranks(what: str, values: Sequence[object], folder: object) -> None:
    """Refuse what must be the same on all ranks and is not. Raises: CheckpointError, the same on every rank."""
    odd = [rank for rank, value in enumerate(values) if value != values[0]]
    if odd:
        raise CheckpointError(f"{folder}: rank {odd[0]} has another {what} than rank 0; pass the same to all ranks")


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
