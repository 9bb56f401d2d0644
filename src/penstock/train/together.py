"""Failing together: what stops one rank stops all of them, with the same words."""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import PenstockError
from penstock.execute.control.collectives import Control
from penstock.execute.transport.protocol import Transport


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
