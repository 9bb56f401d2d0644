"""Third-party code: run so that whatever fails in it is one message, and what it gives made into a `Schedule`.

Functions of a user (`custom.py`) and families of other distributions (`registry.py`) may return or yield one row per
rank, by phases, as text or as actions, or return a drawn grid or a whole `Schedule`.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np

from penstock.errors import ConfigError, FormatError, PenstockError, ScheduleError, count_of, described
from penstock.ir.action import Action, Kind, OverlappedPair
from penstock.ir.formats.cells import Cells, infer_layout
from penstock.ir.grid import from_grid
from penstock.ir.schedule import Schedule
from penstock.schedules.family import Shape
from penstock.schedules.phases import RankOrder

Result = TypeVar("Result")

ROWS = "one row per rank, such as phases(...) or '0F0 0F1 0B0 0B1', a drawing of all ranks, or a Schedule"
OURS = Path(__file__).parents[1]


def run_third_party(name: str, act: Callable[[], Result], *, at: str = "") -> Result:
    """Run third-party code; `at` says where it begins, for an error before its first line.

    Raises:
        ConfigError: for whatever it raises but errors of Penstock's own, which say enough.
    """
    try:
        return act()
    except PenstockError:
        raise
    except (Exception, SystemExit) as error:
        problem = f"{type(error).__name__}: {error}".rstrip(": ")
        where = _last_place(error.__traceback__) or at
        raise ConfigError(f"{where + ': ' if where else ''}{name} failed: {problem}") from error


def _last_place(trace: TracebackType | None) -> str:
    """Return the last line that ran in the file where third-party code begins, as `file:line`; empty without one.

    Files that are called from there are those of libraries.
    """
    places = []
    while trace is not None:
        places.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    third_party_places = [place for place in places if _is_third_party(place[0])]
    lines = [line for file, line in third_party_places if file == third_party_places[0][0]]
    return f"{third_party_places[0][0]}:{lines[-1]}" if third_party_places else ""


def _is_third_party(file: str) -> bool:
    """Return whether a file is neither of Penstock nor of the machinery that imports modules."""
    path = Path(file)
    return OURS not in path.parents and "importlib" not in path.parts and not file.startswith("<frozen")


def as_schedule(result: object, name: str, *, num_ranks: int) -> Schedule:
    """Make a schedule of what third-party code gave; placement and numbers are read off its rows, as from a file.

    Raises:
        ConfigError: if it is nothing of the kind.
    """
    if isinstance(result, Schedule):
        return result
    if isinstance(result, str):
        return _drawn(result, name)
    if not isinstance(result, Iterable):
        raise ConfigError(f"{name} gave {described(result)}; expected {ROWS}")
    rows = list(islice(result, num_ranks + 1))
    if len(rows) != num_ranks:
        count = f"more than {num_ranks}" if len(rows) > num_ranks else str(len(rows))
        raise ConfigError(f"{name} gave {count} rows for {num_ranks} ranks; expected {ROWS}")
    orders = [row for row in rows if isinstance(row, RankOrder)]
    if len(orders) == num_ranks:
        return _refused_by_row(name, lambda: _by_phases(orders, name))
    return _drawn("\n".join(f"rank {rank}: {_row_text(row, name, rank)}" for rank, row in enumerate(rows)), name)


def _drawn(text: str, name: str) -> Schedule:
    return _refused_by_row(name, lambda: from_grid(text, name=name))


def _refused_by_row(name: str, read: Callable[[], Schedule]) -> Schedule:
    try:
        return read()
    except FormatError as error:
        raise ConfigError(f"{name}, row {error.line}: {error.problem}") from None


def _by_phases(orders: list[RankOrder], name: str) -> Schedule:
    def fail(problem: str, rank: int, cell: int, offset: int) -> FormatError:
        return FormatError(problem, line=rank + 1)

    rows = np.concatenate([np.pad(order.rows, ((0, 0), (0, 4 - order.rows.shape[1]))) for order in orders])
    joined = np.concatenate([order.joined for order in orders])
    offsets = np.cumsum([0, *(len(order.rows) for order in orders)])
    kind, stage, microbatch, slice_index = rows.T
    layout = infer_layout(Cells(kind, stage, microbatch, slice_index, joined, offsets), fail)
    schedule = Schedule.from_arrays(name, orders=[order.rows for order in orders], joined=joined, **layout)
    _require_all_microbatches(schedule)
    return schedule


def _require_all_microbatches(schedule: Schedule) -> None:
    """Refuse phases that leave a microbatch out on one rank: what they run twice, or one way only, `phases` refuses."""
    of_stage = list(schedule.placement.route_of_stage)
    expected = np.bincount(schedule.route_of_microbatch)[of_stage] * schedule.num_slices
    unit = "microbatch" if schedule.num_slices == 1 else "slice"
    num_forwards = np.bincount(schedule.stage[schedule.kind == Kind.FORWARD], minlength=len(of_stage))
    for stage in np.flatnonzero(num_forwards != expected).tolist():
        raise ScheduleError(
            f"{schedule.name}: stage {stage} runs {count_of(int(num_forwards[stage]), 'forward')} of "
            f"{count_of(int(expected[stage]), unit)}; expected one each, so let the repeats of f({stage}) add up to it"
        )


def _row_text(row: object, name: str, rank: int) -> str:
    if isinstance(row, RankOrder):
        return str(row)
    if isinstance(row, str):
        return " ".join(row.replace(",", " ").split())
    if not isinstance(row, Iterable):
        raise ConfigError(f"{name} gave {described(row)} for rank {rank}; expected a text or a list of actions")
    entries = list(row)
    for entry in entries:
        if not isinstance(entry, (str, Action, OverlappedPair)):
            raise ConfigError(f"{name} gave {described(entry)} in the row of rank {rank}; expected actions, as 0F0")
    return " ".join(str(entry) for entry in entries)


def sizes_of(shape: Shape | Schedule) -> dict[str, int]:
    """Return the sizes in the words of `build`."""
    return {key: getattr(shape, f"num_{key}") for key in ("ranks", "stages", "microbatches", "slices")}


def require_sizes(name: str, schedule: Schedule, expected_sizes: Mapping[str, int | None]) -> None:
    """Refuse a schedule of other sizes than were asked for; None stands for any.

    Raises:
        ConfigError: for the first that differs.
    """
    for key, size in sizes_of(schedule).items():
        if expected_sizes[key] not in (None, size):
            raise ConfigError(f"{name} made a schedule with {size}, but {expected_sizes[key]} were asked for", key=key)
