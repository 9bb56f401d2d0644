"""Why training stops before its last step: a signal, or a held-out loss that does not fall any more.

A signal is a wish. It is fulfilled between two steps, when a checkpoint can be saved.

User code that ends the process in the midst of a run is no such wish, but a failure.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event

from penstock.errors import PipelineError, count_of, shortened


@contextmanager
def refusing_exit(when: str = "") -> Iterator[None]:
    """Turn a `sys.exit` of user code in the block into a failure: the run is not over, whatever the status says.

    Raises: PipelineError, which begins with `when`.
    """
    try:
        yield
    except SystemExit as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise PipelineError(
            f"{when}{': ' if when else ''}sys.exit({shortened(error.code)}) at {frame.filename}:{frame.lineno} ended "
            "the run before it was over. Raise an error there; to end a run early, set run.steps or run.patience"
        ) from error


class StopRequest:
    """Tells the training loop of this process that it should stop; any thread may ask."""

    def __init__(self) -> None:
        self._requested = Event()
        self.limit_s: float | None = None
        """Seconds that the loop may take to stop; None while no loop runs, so that the process has to be ended."""

    @property
    def is_requested(self) -> bool:
        return self._requested.is_set()

    def request(self) -> None:
        self._requested.set()

    @contextmanager
    def watched(self, limit_s: float) -> Iterator[None]:
        """Promise to look at the wish between steps, and to stop within so long, while the block lasts."""
        self.limit_s = limit_s
        try:
            yield
        finally:
            self.limit_s = None


@dataclass(slots=True)
class EarlyStop:
    """Counts the evaluations since the lowest held-out loss; every rank counts alike."""

    patience: int
    """Evaluations in a row without a lower loss that end a run; 0: none does."""
    lowest: float | None = None
    num_since: int = 0
    """Evaluations since the lowest."""

    def note(self, held_out_loss: float | None) -> bool:
        """Take in a step, which may not have been evaluated; return whether the run ends with it."""
        if held_out_loss is None or not self.patience:
            return False
        if self.lowest is None or held_out_loss < self.lowest:
            self.lowest, self.num_since = held_out_loss, 0
            return False
        self.num_since += 1
        return self.num_since >= self.patience

    def describe(self) -> str:
        """Say why the run ends."""
        return f"{count_of(self.num_since, 'evaluation')} in a row without a held-out loss below {self.lowest:.4f}"
