"""Doing something on every rank that may fail on one: all ranks hear of it at once, none waits for its deadline."""

from collections.abc import Callable
from typing import TypeVar

from penstock.errors import ConfigError, PenstockError, PipelineError
from penstock.execute.transport.protocol import Transport

T = TypeVar("T")


def together(transport: Transport, make: Callable[[], T]) -> T:
    """Return what `make` returns; every rank calls it, and if it fails on any, it fails on all. A collective.

    Raises:
        Exception: the rank's own, else a ConfigError with the words of the first rank that has one.
    """
    failure: Exception | None = None
    try:
        made = make()
    except Exception as error:  # whatever it is, the other ranks must hear of it
        failure = error
        if isinstance(error, PipelineError) and error.rank is None:
            error.rank = transport.rank
    texts = transport.all_gather_object("" if failure is None else _words(failure))
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text:
            raise ConfigError(f"rank {rank}: {text}")
    return made


def _words(failure: Exception) -> str:
    return str(failure) if isinstance(failure, PenstockError) else f"{type(failure).__name__}: {failure}"
