"""Code that is not ours: run so that whatever fails in it is one message, and what it gives made into a `Schedule`.

Functions of a user (`own.py`) and families of other distributions (`registry.py`) may return or yield one row per rank,
as text or as actions, or return a drawn grid or a whole `Schedule`.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from penstock.errors import ConfigError, FormatError, PenstockError, described
from penstock.ir.action import Action, OverlappedPair
from penstock.ir.grid import from_grid
from penstock.ir.schedule import Schedule

Result = TypeVar("Result")

ROWS = "one row per rank, such as '0F0 0F1 0B0 0B1', a drawing of all ranks, or a Schedule"
OURS = Path(__file__).parents[1]


def run_foreign(name: str, act: Callable[[], Result], *, at: str = "") -> Result:
    """Run code that is not ours; `at` says where it begins, for an error before its first line.

    Raises:
        ConfigError: for whatever it raises but errors of Penstock's own, which say enough.
    """
    try:
        return act()
    except PenstockError:
        raise
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        where = _last_place(error.__traceback__) or at
        raise ConfigError(f"{where + ': ' if where else ''}{name} failed: {said}") from error


def _last_place(trace: TracebackType | None) -> str:
    """The last line that ran in the file where foreign code begins; what lies deeper is a library's."""
    places = []
    while trace is not None:
        places.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    foreign = [place for place in places if _is_foreign(place[0])]
    lines = [line for file, line in foreign if file == foreign[0][0]]
    return f"{foreign[0][0]}:{lines[-1]}" if foreign else ""


def _is_foreign(file: str) -> bool:
    """Whether a file is neither ours nor of the machinery that imports modules."""
    path = Path(file)
    return OURS not in path.parents and "importlib" not in path.parts and not file.startswith("<frozen")


def as_schedule(result: object, name: str, *, num_ranks: int) -> Schedule:
    """Make a schedule of what foreign code gave; placement and numbers are read off its rows, as from a file.

    Raises:
        ConfigError: if it is nothing of the kind.
    """
    if isinstance(result, Schedule):
        return result
    if isinstance(result, str):
        return _drawn(result, name)
    if not isinstance(result, Iterable):
        raise ConfigError(f"{name} gave {described(result)}; expected {ROWS}")
    rows = [_row_text(row, name, rank) for rank, row in enumerate(islice(result, num_ranks + 1))]
    if len(rows) != num_ranks:
        count = f"more than {num_ranks}" if len(rows) > num_ranks else str(len(rows))
        raise ConfigError(f"{name} gave {count} rows for {num_ranks} ranks; expected {ROWS}")
    return _drawn("\n".join(f"rank {rank}: {row}" for rank, row in enumerate(rows)), name)


def _drawn(text: str, name: str) -> Schedule:
    try:
        return from_grid(text, name=name)
    except FormatError as error:
        raise ConfigError(f"{name}, row {error.line}: {error.problem}") from None


def _row_text(row: object, name: str, rank: int) -> str:
    if isinstance(row, str):
        return " ".join(row.replace(",", " ").split())
    if not isinstance(row, Iterable):
        raise ConfigError(f"{name} gave {described(row)} for rank {rank}; expected a text or a list of actions")
    entries = list(row)
    for entry in entries:
        if not isinstance(entry, (str, Action, OverlappedPair)):
            raise ConfigError(f"{name} gave {described(entry)} in the row of rank {rank}; expected actions, as 0F0")
    return " ".join(str(entry) for entry in entries)


def require_sizes(name: str, schedule: Schedule, asked: Mapping[str, int | None]) -> None:
    """Refuse a schedule of other sizes than were asked for; None stands for any.

    Raises:
        ConfigError: for the first that differs.
    """
    made = {
        "ranks": schedule.num_ranks,
        "stages": schedule.num_stages,
        "microbatches": schedule.num_microbatches,
        "slices": schedule.num_slices,
    }
    for key, size in made.items():
        if asked[key] not in (None, size):
            raise ConfigError(f"{name} made a schedule with {size}, but {asked[key]} were asked for", key=key)
