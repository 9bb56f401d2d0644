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
from penstock.ir.hot import Hot
from penstock.ir.operations import Op
from penstock.ir.program import NewRows, Program
from penstock.lowering.place_reductions import behind_sends


class Stays(NamedTuple):
    """Per stay of a unit in memory: the unit, the computation at which its gather starts, and its last use."""

    unit: Any
    gather: Any
    last: Any


def place_gathers(program: Program, residency: int | None = 2, look_ahead: int = 1) -> Program:
    """Add an UNSHARD and a RESHARD for each time that the weights of a unit become whole.

    At most `residency` units of a rank are whole at once; None: all.

    Raises:
        ConfigError: for anything but a `residency` of 1 or more, or of 2 or more where an overlapped pair uses two
            units, and for anything but 0 or more computations to `look_ahead`.
    """
    _require(residency, look_ahead)
    begins = program.is_compute & ~np.append(False, program.joined[:-1])
    first = np.flatnonzero(begins)
    unit, other = _uses(program, first)
    stage_unit = program.unit_of_stage
    num_units = np.array([len({stage_unit[stage] for stage in held}) for held in program.placement.stages_of_rank])
    most = num_units if residency is None else np.minimum(num_units, residency)
    if (most[program.rank_of_row[first[other >= 0]]] < 2).any():
        problem = f"1, but {program.name} has overlapped pairs of two stages, which are whole at the same time"
        raise ConfigError(f"{problem}; give 2 or more", key="residency")
    stays = _stays(program, first, unit, other, most, look_ahead)
    last = first[stays.last]
    key = np.concatenate([
        NewRows.before(first[stays.gather]),
        NewRows.after(behind_sends(program, last + program.joined[last])),
    ])  # fmt: skip
    unit, zeros = np.tile(stays.unit, 2), np.zeros(len(key), np.int32)
    rank = np.array(program.placement.rank_of_stage)[unit]
    op = np.repeat([Op.UNSHARD, Op.RESHARD], len(stays.unit))
    return program.inserted(NewRows(key, rank, op, unit, zeros, zeros, unit))


def _require(residency: object, look_ahead: object) -> None:
    def is_number(value: object, smallest: int) -> bool:
        return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= smallest)

    if residency is not None and not is_number(residency, 1):
        expected = "expected how many stages of a rank may be whole at once, 1 or more, or None for all"
        raise ConfigError(f"{described(residency)}; {expected}", key="residency")
    if not is_number(look_ahead, 0):
        raise ConfigError(f"{described(look_ahead)}; expected a number of computations, 0 or more", key="look_ahead")


def _uses(program: Program, first: NDArray[np.intp]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Per computation, an overlapped pair being one: the unit that it uses, and the other one of a pair, else -1."""
    unit_of_stage = program.unit_of_stage.astype(np.int32)
    unit, other = unit_of_stage[program.stage[first]], np.full(len(first), -1, np.int32)
    pairs = np.flatnonzero(program.joined[first])
    other[pairs] = unit_of_stage[program.stage[first[pairs] + 1]]
    other[other == unit] = -1
    return unit, other


def _stays(
    program: Program,
    first: NDArray[np.intp],
    unit: NDArray[np.int32],
    other: NDArray[np.int32],
    most: NDArray[np.int64],
    look_ahead: int,
) -> Stays:
    offsets, num_whole = np.searchsorted(first, program.offsets), 1 + (other >= 0).astype(np.int32)
    stays = Stays(*np.zeros((3, int(num_whole.sum())), np.int32))
    stay_of_unit = np.full(program.num_stages, -1, np.int32)
    # No gather starts before the first computation of its rank, so a larger number changes nothing.
    ahead = min(int(look_ahead), len(first))
    count = _PLACE(len(first), offsets, most, ahead, unit, other, num_whole, stay_of_unit, stays)
    return Stays(*(column[:count] for column in stays))


def _begin_of_room(at: int, until: int, most: int, num_whole: Any) -> int:
    """Return the first computation from which on to the one before `at` there is room; `until` or later."""
    begin = at
    while begin > until and num_whole[begin - 1] < most:
        begin -= 1
    return begin


def _place_all(
    offsets: Any, most: Any, ahead: int, unit: Any, other: Any, num_whole: Any, stay_of_unit: Any, stays: Stays
) -> int:
    """Go through the uses of each rank; return the number of stays. `num_whole` is per computation."""
    count = 0
    for rank in range(len(offsets) - 1):
        for use in range(2 * offsets[rank], 2 * offsets[rank + 1]):
            at = use // 2
            used = unit[at] if use % 2 == 0 else other[at]
            if used < 0:
                continue
            stay = stay_of_unit[used]
            before = stays.last[stay] + 1 if stay >= 0 else -1
            begin = _begin_of_room(at, before, most[rank], num_whole) if stay >= 0 else at
            if stay < 0 or begin > before:
                begin = _begin_of_room(at, max(at - ahead, offsets[rank]), most[rank], num_whole)
                stay = stay_of_unit[used] = count
                stays.unit[stay] = used
                stays.gather[stay] = begin
                count += 1
            stays.last[stay] = at
            for whole in range(begin, at):
                num_whole[whole] += 1
    return count


_PLACE = Hot(_place_all, _begin_of_room)
