"""Position boards of ranks that are threads of this process, and the watchdog of one."""

from contextlib import contextmanager

from penstock.execute.control.positions import PositionMemory
from penstock.execute.transport.rank_names import RankNames


def boards_of_threads(num_ranks):
    with PositionMemory(RankNames.plain(num_ranks)) as memory:
        places = ["here"] * num_ranks, [memory.path] * num_ranks
        return [memory.board(rank, *places) for rank in range(num_ranks)]


@contextmanager
def watching(watchdog):
    watchdog.start()
    try:
        yield watchdog
    finally:
        watchdog.stop()
