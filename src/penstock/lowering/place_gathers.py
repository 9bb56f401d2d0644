"""Pass: gather the whole weights of sharded stages for as long as they are used, so that few are whole at once.

    residency=1, look_ahead=0
    Before: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    After:  0UNSHARD 0F0 0F1 0RESHARD 2UNSHARD 2F0 2F1 2B0 2B1 2RESHARD 0UNSHARD 0B0 0B1 0RESHARD

    residency=2, look_ahead=1
    After:  0UNSHARD 0F0 2UNSHARD 0F1 2F0 2F1 2B0 2B1 2RESHARD 0B0 0B1 0RESHARD

The uses of a rank's units are gone through in order. A unit stays whole since its use before where there is room all
the way. So of those that compete for room, the one whose next use is furthest is dropped. Otherwise it is gathered
again, so many computations early as there is room, an overlapped pair being one; that room is taken then. RESHARD comes
right after the last use of a unit before it is gathered again.

Without a look-ahead this needs the fewest gathers there can be. The times between two uses are intervals, of which only
so many may overlap; to take those first that end first finds the most of them (M. Yannakakis and F. Gavril, The maximum
k-colorable subgraph problem for chordal graphs, 1987), as many as dropping the furthest next use does (L. A. Belady, A
study of replacement algorithms for a virtual-storage computer, 1966).
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, described
from penstock.ir.collectives import MAKES_GRADIENT
from penstock.ir.hot import Hot
from penstock.ir.operations import Op
from penstock.ir.program import NewRows, Program
from penstock.lowering.align import Clock
from penstock.lowering.place_reductions import behind_sends


class Stays(NamedTuple):
    """Columns of the stays of units in memory, one entry per stay; computations are counted with a pair as one."""

    unit: Any
    gather: Any
    """The computation at which the gather of the unit starts."""
    last: Any
    """The last computation that uses the unit before it is dropped."""


def place_gathers(
    program: Program, residency: int | None = 2, look_ahead: int = 1, *, aligned: bool = False
) -> Program:
    """Add an UNSHARD and a RESHARD around each time that the weights of a unit are whole.

    A unit is a stage, or stages of a rank that share a parameter; the weights of a unit are sharded over replicas and
    gathered as one. At most `residency` units of a rank are whole at once (None: all). A gather starts `look_ahead`
    computations before its first use, if there is room. With `aligned`, gathers start earlier, and units that have new
    gradients are dropped later, so that the collectives of different ranks start together (`lowering.align`), as far as
    there is room.

    Raises:
        ConfigError: for anything but a `residency` of 1 or more, or of 2 or more where an overlapped pair uses two
            units, and for anything but 0 or more computations to `look_ahead`.
    """
    _require_options(residency, look_ahead)
    # Count computations, an overlapped pair as one.
    begins = program.is_compute & ~np.append(False, program.joined[:-1])
    first_row = np.flatnonzero(begins)  # of each computation
    unit, second_unit = _used_units(program, first_row)
    most_units = _most_units(program, residency)
    if (most_units[program.rank_of_row[first_row[second_unit >= 0]]] < 2).any():
        problem = f"1, but {program.name} has overlapped pairs of two stages, which are whole at the same time"
        raise ConfigError(f"{problem}; give 2 or more", key="residency")
    # A stay is the time from a gather of a unit until it is dropped.
    num_whole = 1 + (second_unit >= 0).astype(np.int32)
    stays = _choose_stays(program, first_row, unit, second_unit, num_whole, most_units, look_ahead)
    # Rows that are aligned to one place keep the order that they had before.
    by_gather, by_last = (np.argsort(column, kind="stable") for column in (stays.gather, stays.last))
    if aligned and len(stays.unit):
        _align(program, first_row, stays, num_whole, most_units)
    last_row = first_row[stays.last[by_last]]
    # The key of a new row says before or after which row it is inserted.
    key = np.concatenate([
        NewRows.before(first_row[stays.gather[by_gather]]),
        NewRows.after(behind_sends(program, last_row + program.joined[last_row])),
    ])  # fmt: skip
    # Insert both rows of each stay: the first half of the new rows are UNSHARDs, the second half RESHARDs.
    unit, zeros = np.concatenate([stays.unit[by_gather], stays.unit[by_last]]), np.zeros(len(key), np.int32)
    rank = np.array(program.placement.rank_of_stage)[unit]
    op = np.repeat([Op.UNSHARD, Op.RESHARD], len(stays.unit))
    return program.inserted(NewRows(key, rank, op, unit, zeros, zeros, unit))


def _require_options(residency: object, look_ahead: object) -> None:
    def is_number(value: object, smallest: int) -> bool:
        return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= smallest)

    if residency is not None and not is_number(residency, 1):
        expected = "expected how many stages of a rank may be whole at once, 1 or more, or None for all"
        raise ConfigError(f"{described(residency)}; {expected}", key="residency")
    if not is_number(look_ahead, 0):
        raise ConfigError(f"{described(look_ahead)}; expected a number of computations, 0 or more", key="look_ahead")


def _most_units(program: Program, residency: int | None) -> NDArray[np.int64]:
    """[num_ranks] the most units of each rank that may be whole at once."""
    units_of_rank = [set(program.unit_of_stage[list(stages)]) for stages in program.placement.stages_of_rank]
    num_units = np.array([len(units) for units in units_of_rank])
    return num_units if residency is None else np.minimum(num_units, residency)


def _used_units(program: Program, first_row: NDArray[np.intp]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """[num_computations] the unit that a computation uses, and the second one that an overlapped pair uses, else -1."""
    unit_of_stage = program.unit_of_stage.astype(np.int32)
    unit, second_unit = unit_of_stage[program.stage[first_row]], np.full(len(first_row), -1, np.int32)
    pairs = np.flatnonzero(program.joined[first_row])
    second_unit[pairs] = unit_of_stage[program.stage[first_row[pairs] + 1]]
    second_unit[second_unit == unit] = -1
    return unit, second_unit


def _choose_stays(
    program: Program,
    first_row: NDArray[np.intp],
    unit: NDArray[np.int32],
    second_unit: NDArray[np.int32],
    num_whole: NDArray[np.int32],
    most_units: NDArray[np.int64],
    look_ahead: int,
) -> Stays:
    """Choose when each unit is whole, from the units that each computation uses, the first row of each given.

    `num_whole` has how many units each computation uses, and is filled with how many are whole while it runs.
    """
    offsets = np.searchsorted(first_row, program.offsets)
    stays = Stays(*np.zeros((3, int(num_whole.sum())), np.int32))
    stay_of_unit = np.full(program.num_stages, -1, np.int32)
    # No gather starts before the first computation of its rank, so a larger number changes nothing.
    ahead = min(int(look_ahead), len(first_row))
    count = _PLACE(len(first_row), offsets, most_units, ahead, unit, second_unit, num_whole, stay_of_unit, stays)
    return Stays(*(column[:count] for column in stays))


def _align(
    program: Program,
    first_row: NDArray[np.intp],
    stays: Stays,
    num_whole: NDArray[np.int32],
    most_units: NDArray[np.int64],
) -> None:
    """Let stays begin earlier and end later, so that the collectives of different ranks start together."""
    clock = Clock.of(program)
    earliest, latest = clock.earliest_together(stays.gather), stays.last.astype(np.int64)
    is_reduced = _have_gradients(program, first_row, stays)
    latest[is_reduced] = clock.latest_together(stays.last[is_reduced])
    # At least one computation of a rank is between two stays of a unit, or the drop and the gather would be in vain.
    in_order = np.lexsort((stays.gather, stays.unit))
    earlier_stay, later_stay = in_order[:-1], in_order[1:]
    is_same = stays.unit[earlier_stay] == stays.unit[later_stay]
    earlier_stay, later_stay = earlier_stay[is_same], later_stay[is_same]
    earliest[later_stay] = np.maximum(earliest[later_stay], stays.last[earlier_stay] + 2)
    rank_of_stay = clock.rank[stays.gather]
    gather = stays.gather.copy()
    _EXTEND(len(first_row), gather, earliest, -1, num_whole, most_units[rank_of_stay])
    latest[earlier_stay] = np.minimum(latest[earlier_stay], gather[later_stay] - 2)
    _EXTEND(len(first_row), stays.last, latest, 1, num_whole, most_units[rank_of_stay])
    stays.gather[:] = gather


def _have_gradients(program: Program, first_row: NDArray[np.intp], stays: Stays) -> NDArray[np.bool_]:
    """[num_stays] whether the unit makes gradients in a stay, which are reduced before it is dropped."""
    rows = program.rows_of(MAKES_GRADIENT)
    computation = np.searchsorted(first_row, rows, side="right") - 1
    keys = np.sort(program.unit_of_stage[program.stage[rows]] * len(first_row) + computation)
    begin, end = (stays.unit.astype(np.int64) * len(first_row) + column for column in (stays.gather, stays.last))
    return np.asarray(np.searchsorted(keys, end, side="right") > np.searchsorted(keys, begin))


def _extend(computation: Any, target: Any, direction: int, num_whole: Any, max_whole: Any) -> None:
    """Move the ends of stays towards their targets, one computation after another, as far as there is room."""
    for stay in range(len(computation)):
        while (target[stay] - computation[stay]) * direction > 0:
            following = computation[stay] + direction
            if num_whole[following] >= max_whole[stay]:
                break
            num_whole[following] += 1
            computation[stay] = following


_EXTEND = Hot(_extend)


def _first_with_room(use: int, earliest: int, max_whole: int, num_whole: Any) -> int:
    """Return the first computation, `earliest` or later, from which there is room for a unit until just before `use`.

    There is room at a computation where fewer than `max_whole` units are whole.
    """
    begin = use
    while begin > earliest and num_whole[begin - 1] < max_whole:
        begin -= 1
    return begin


def _place_all(
    offsets: Any,
    max_whole: Any,
    ahead: int,
    unit: Any,
    second_unit: Any,
    num_whole: Any,
    stay_of_unit: Any,
    stays: Stays,
) -> int:
    """Fill `stays`, the times for which units are whole, from the uses of units on each rank; return their number.

    A unit is a stage or several that are gathered as one. Computations are numbered over all ranks, an overlapped pair
    as one; `offsets` [num_ranks + 1] says where each rank's begin. `unit` and `second_unit` [num_computations] are the
    units that each uses, -1 for none. `max_whole` [num_ranks] is the most units that may be whole at once. `num_whole`
    [num_computations] counts whole units; at first it counts those that the computation uses itself.
    """
    count = 0
    for rank in range(len(offsets) - 1):
        # Each computation is two halves: its own unit, and that of the second action of a pair.
        for half in range(2 * offsets[rank], 2 * offsets[rank + 1]):
            use = half // 2
            used_unit = unit[use] if half % 2 == 0 else second_unit[use]
            if used_unit < 0:
                continue
            stay = stay_of_unit[used_unit]
            after_last_use = stays.last[stay] + 1 if stay >= 0 else -1
            begin = _first_with_room(use, after_last_use, max_whole[rank], num_whole) if stay >= 0 else use
            # The unit stays whole since its last use if there is room at all computations from there on. Otherwise it
            # was dropped after that use, and is gathered again, as early as there is room, but at most `ahead`
            # computations before this use.
            if stay < 0 or begin > after_last_use:
                begin = _first_with_room(use, max(use - ahead, offsets[rank]), max_whole[rank], num_whole)
                stay = stay_of_unit[used_unit] = count
                stays.unit[stay] = used_unit
                stays.gather[stay] = begin
                count += 1
            stays.last[stay] = use
            # The unit takes up room from there until just before this use, at which it is counted already.
            for computation in range(begin, use):
                num_whole[computation] += 1
    return count


_PLACE = Hot(_place_all, _first_with_room)
