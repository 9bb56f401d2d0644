"""Report that loops are being compiled, where a command waits for that."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

from penstock.cli.output import complain

PATIENCE_S = 1.0
_LOGGER = logging.getLogger("penstock.ir.hot")


@contextmanager
def compiling_reported(patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Print one line to standard error as soon as compiling has taken `patience_s` in all."""
    handler, level = _Handler(patience_s), _LOGGER.level
    _LOGGER.addHandler(handler)
    _LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        handler.timer.cancel()
        _LOGGER.setLevel(level)
        _LOGGER.removeHandler(handler)


class _Handler(logging.Handler):
    """Follows the two records of each compilation: `compiled_s` stands in the second."""

    def __init__(self, patience_s: float) -> None:
        super().__init__()
        self._left_s = patience_s
        self.timer = self._new_timer()

    def emit(self, record: logging.LogRecord) -> None:
        self.timer.cancel()
        if hasattr(record, "compiled_s"):
            self._left_s -= record.compiled_s
        elif self._left_s < math.inf:
            self.timer = self._new_timer()
            self.timer.start()

    def _new_timer(self) -> Timer:
        timer = Timer(max(self._left_s, 0.0), self._report)
        timer.daemon = True
        return timer

    def _report(self) -> None:
        self._left_s = math.inf
        complain("compiling loops for large tables (once, some seconds) ...")
