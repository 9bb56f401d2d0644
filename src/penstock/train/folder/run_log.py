"""The log of a run: what the pipeline of each rank says, in a file of its own in the run folder."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.execute.observing.log import LOG

_LEVELS = {"info": logging.INFO, "debug": logging.DEBUG}
_FORMAT = "%(asctime)s %(levelname)s %(message)s"


@contextmanager
def run_log(folder: Path, rank: int, level: str) -> Iterator[None]:
    """Write what is logged meanwhile, from "info" or "debug" on, to the rank's file; "off" writes nothing."""
    if level not in _LEVELS:
        yield
        return
    handler = logging.FileHandler(folder / f"rank{rank}.log", mode="a", encoding="utf-8")
    handler.setFormatter(logging.Formatter(_FORMAT))
    before = LOG.level
    LOG.addHandler(handler)
    LOG.setLevel(_LEVELS[level])
    try:
        yield
    finally:
        LOG.setLevel(before)
        LOG.removeHandler(handler)
        handler.close()
