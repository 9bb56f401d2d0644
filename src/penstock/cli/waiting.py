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

MAX_WAIT_S = 3.0
COMPILING_MAX_WAIT_S = 1.0
SILENT = ("check", "compare", "convert", "show")
"""The commands that say nothing before their result."""
_LOGGER = logging.getLogger("penstock.ir.hot")


@contextmanager
def waiting_reported(arguments: Namespace, max_wait_s: float = MAX_WAIT_S) -> Iterator[None]:
    """Print one line to standard error, if it is a terminal, as soon as a silent command has taken `max_wait_s`."""
    if arguments.command not in SILENT or not sys.stderr.isatty():
        yield
        return
    timer = _timer(max_wait_s, partial(complain, _line(arguments)))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def compiling_reported(max_wait_s: float = COMPILING_MAX_WAIT_S) -> Iterator[None]:
    """Print one line to standard error as soon as compiling has taken `max_wait_s` in all."""
    handler, level = _Handler(max_wait_s), _LOGGER.level
    _LOGGER.addHandler(handler)
    _LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        handler.timer.cancel()
        _LOGGER.setLevel(level)
        _LOGGER.removeHandler(handler)


class _Handler(logging.Handler):
    """Follows the two records of each compilation; the second has its seconds, `compiled_s`."""

    def __init__(self, max_wait_s: float) -> None:
        super().__init__()
        self._left_s = max_wait_s
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
    size_text = " and ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"still at work{f' on {size_text}' if size_text else ''} ...; Ctrl-C ends it"
