"""Report that a command is still at work, or that loops are being compiled, where somebody waits for it."""

import logging
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Timer

from penstock.cli.output import complain

PATIENCE_S = 3.0
COMPILING_PATIENCE_S = 1.0
SILENT = ("check", "compare", "convert", "show")
"""The commands that say nothing before their result."""
_LOGGER = logging.getLogger("penstock.ir.hot")


@contextmanager
def waiting_reported(arguments: Namespace, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Print one line to standard error, if it is a terminal, as soon as a silent command has taken `patience_s`."""
    if arguments.command not in SILENT or not sys.stderr.isatty():
        yield
        return
    timer = _timer(patience_s, partial(complain, _line(arguments)))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def compiling_reported(patience_s: float = COMPILING_PATIENCE_S) -> Iterator[None]:
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
        return _timer(max(self._left_s, 0.0), self._report)

    def _report(self) -> None:
        self._left_s = math.inf
        complain("compiling loops for large tables (once, some seconds) ...")


def _timer(seconds: float, report: Callable[[], None]) -> Timer:
    """Return a timer that keeps no process from ending."""
    timer = Timer(seconds, report)
    timer.daemon = True
    return timer


def _line(arguments: Namespace) -> str:
    counts = {name: getattr(arguments, name, None) for name in ("ranks", "microbatches")}
    given = " and ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"still at work{f' on {given}' if given else ''} ...; Ctrl-C ends it"
