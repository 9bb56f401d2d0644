"""Report that a planning command is still at work, where somebody waits for it in a terminal."""

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

from penstock.cli.output import complain

PATIENCE_S = 3.0
SILENT = ("check", "compare", "convert", "show")
"""The commands that say nothing before their result."""


@contextmanager
def waiting_reported(arguments: Namespace, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Print one line to standard error, if it is a terminal, as soon as a silent command has taken `patience_s`."""
    if arguments.command not in SILENT or not sys.stderr.isatty():
        yield
        return
    timer = Timer(patience_s, complain, (_line(arguments),))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _line(arguments: Namespace) -> str:
    counts = {name: getattr(arguments, name, None) for name in ("ranks", "microbatches")}
    given = " and ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"still at work{f' on {given}' if given else ''} ...; Ctrl-C ends it"
