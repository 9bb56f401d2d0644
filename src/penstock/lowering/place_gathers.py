"""Pass: gather the whole weights of sharded stages for as long as they are used, so that few are whole at once.

    residency=1, look_ahead=0
    Before: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    After:  0UNSHARD 0F0 0F1 0RESHARD 2UNSHARD 2F0 2F1 2B0 2B1 2RESHARD 0UNSHARD 0B0 0B1 0RESHARD

    residency=2, look_ahead=1
    After:  0UNSHARD 0F0 2UNSHARD 0F1 2F0 2F1 2B0 2B1 2RESHARD 0B0 0B1 0RESHARD

A rank has as many places as units may be whole at once, those being gathered included. A unit that is used while it is
not whole takes the place of one that is not used from `look_ahead` computations before on, so that its gather can start
there; of these, of the one whose next use is furthest. An overlapped pair is one computation. Without a look-ahead that
needs the fewest gathers there can be (Belady, A study of replacement algorithms for a virtual-storage computer, 1966).

Once all is placed, RESHARD comes right after the last use of a unit in its place. Where that leaves room all the way
between two stays of a unit, it stays whole; where there is room before a stay, its gather starts early.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, described
from penstock.ir.hot import Hot
from penstock.ir.operations import Op
from penstock.ir.program import NewRows, Program
from penstock.lowering.place_reductions import behind_sends

NEVER = np.iinfo(np.int32).max
"""The next use of a unit that is used no more."""


class Uses(NamedTuple):
    """Of each computation, an overlapped pair being one: the units that it uses, and where each is used next.

    The second unit is -1 where there is none.
    """

    first: Any
    second: Any
    first_again: Any
    second_again: Any


class Places(NamedTuple):
    """Per place of a rank: the unit in it, its last use so far, its next one, and the number of its stay."""

    unit: Any
    last: Any
    again: Any
    stay: Any


class Stays(NamedTuple):
    """Per stay of a unit in a place: the unit, its first and last use, and the computation where its gather starts."""

    unit: Any
    first: Any
    last: Any
    gather: Any


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
    uses = _uses(program, first)
    offsets = np.searchsorted(first, program.offsets)
    num_units = np.array([len({program.unit_of_stage[s] for s in held}) for held in program.placement.stages_of_rank])
    num_places = np.minimum(num_units, NEVER if residency is None else residency)
    _require_room(program, uses, num_places)
    stays = _stays(program, uses, offsets, num_places, look_ahead)
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


def _require_room(program: Program, uses: Uses, num_places: NDArray[np.int64]) -> None:
    """Refuse one place where two stages are needed at once; raises ConfigError."""
    pairs = uses.first[uses.second >= 0]
    ranks = np.array(program.placement.rank_of_stage)[pairs]
    if (num_places[ranks] < 2).any():
        problem = f"1, but {program.name} has overlapped pairs of two stages, which are whole at the same time"
        raise ConfigError(f"{problem}; give 2 or more", key="residency")


def _uses(program: Program, first: NDArray[np.intp]) -> Uses:
    unit = program.unit_of_stage.astype(np.int32)
    one, other = unit[program.stage[first]], np.full(len(first), -1, np.int32)
    pairs = np.flatnonzero(program.joined[first])
    other[pairs] = unit[program.stage[first[pairs] + 1]]
    other[other == one] = -1
    again = np.full((2, len(first)), NEVER, np.int32)
    uses = Uses(one, other, again[0], again[1])
    _LOOK_BACK(len(first), uses, np.full(program.num_stages, NEVER, np.int32))
    return uses


def _look_back(uses: Uses, again: Any) -> None:
    """Find the next uses; `again` has that of each unit."""
    for index in range(len(uses.first) - 1, -1, -1):
        uses.first_again[index] = again[uses.first[index]]
        if uses.second[index] >= 0:
            uses.second_again[index] = again[uses.second[index]]
            again[uses.second[index]] = index
        again[uses.first[index]] = index


def _stays(
    program: Program, uses: Uses, offsets: NDArray[np.intp], num_places: NDArray[np.int64], look_ahead: int
) -> Stays:
    places = Places(*np.zeros((4, int(num_places.max(initial=0))), np.int32))
    stays = Stays(*np.zeros((4, 2 * len(uses.first)), np.int32))
    # No gather starts before the first computation of its rank, so a larger number changes nothing.
    ahead = min(int(look_ahead), len(uses.first))
    by_unit = np.full((2, program.num_stages), -1, np.int32)
    number = _STAY(len(uses.first), offsets, num_places, ahead, uses, places, by_unit[0], stays)
    stays = Stays(*(column[:number] for column in stays))
    num_whole = np.zeros(len(uses.first) + 1, np.int32)
    np.add.at(num_whole, stays.first, 1)
    np.add.at(num_whole, stays.last + 1, -1)
    num_whole = np.cumsum(num_whole, dtype=np.int32)
    rank = np.array(program.placement.rank_of_stage)[stays.unit]
    _LOOK_AHEAD(len(uses.first), stays, offsets[rank], num_places[rank], ahead, num_whole, by_unit[1])
    return Stays(*(column[stays.gather >= 0] for column in stays))


def _find_place(other: int, begin: int, num_places: int, places: Places) -> int:
    """Return the place whose unit is used again last, and is not the other one of a pair.

    Places that are free from the computation `begin` on come before the others.
    """
    found = -1
    for place in range(num_places):
        if other >= 0 and places.unit[place] == other:
            continue
        is_free = places.last[place] < begin
        was_free = found >= 0 and places.last[found] < begin
        if (
            found < 0
            or (is_free and not was_free)
            or (is_free == was_free and places.again[place] > places.again[found])
        ):
            found = place
    return found


def _use(at: int, member: int, ahead: int, num_places: int, uses: Uses, places: Places, place_of_unit: Any) -> int:
    """Use one of the units of a computation in its place; return the place if it has just taken it, else -1 less it."""
    unit, other = uses.first[at], uses.second[at]
    again = uses.first_again[at]
    if member == 1:
        unit, other = other, unit
        again = uses.second_again[at]
    place: int = place_of_unit[unit]
    is_new = place < 0
    if is_new:
        place = _find_place(other, at - ahead, num_places, places)
        if places.unit[place] >= 0:
            place_of_unit[places.unit[place]] = -1
        places.unit[place] = unit
        place_of_unit[unit] = place
    places.last[place] = at
    places.again[place] = again
    return place if is_new else -1 - place


def _stay_all(
    offsets: Any, num_places: Any, ahead: int, uses: Uses, places: Places, place_of_unit: Any, stays: Stays
) -> int:
    """Go through the computations of each rank; return how often a unit has taken a place."""
    count = 0
    for rank in range(len(offsets) - 1):
        for place in range(num_places[rank]):
            places.unit[place] = -1
            places.last[place] = -1
            places.again[place] = NEVER
        for use in range(2 * offsets[rank], 2 * offsets[rank + 1]):
            at, member = use // 2, use % 2
            if member == 1 and uses.second[at] < 0:
                continue
            place = _use(at, member, ahead, num_places[rank], uses, places, place_of_unit)
            if place >= 0:
                stays.unit[count] = places.unit[place]
                stays.first[count] = at
                places.stay[place] = count
                count += 1
            else:
                place = -1 - place
            stays.last[places.stay[place]] = at
    return count


def _look_ahead(
    stays: Stays, begin_of_rank: Any, num_places: Any, ahead: int, num_whole: Any, stay_of_unit: Any
) -> None:
    """Start gathers early, the one that is used first before the others; `num_whole` is per computation.

    A stay that follows another one of its unit without a lack of room between is a part of that one; its gather is -1.
    """
    for stay in range(len(stays.unit)):
        first, unit = stays.first[stay], stays.unit[stay]
        before = stay_of_unit[unit]
        # There is something to find beyond the look-ahead only where the unit has been whole before.
        until = max(first - ahead, begin_of_rank[stay]) if before < 0 else stays.last[before] + 1
        gather = first
        while gather > until and num_whole[gather - 1] < num_places[stay]:
            gather -= 1
        if before >= 0 and gather == until:
            stays.last[before] = stays.last[stay]
            stays.gather[stay] = -1
        else:
            gather = max(gather, first - ahead)
            stays.gather[stay] = gather
            stay_of_unit[unit] = stay
        for at in range(gather, first):
            num_whole[at] += 1


_LOOK_BACK = Hot(_look_back)
_STAY = Hot(_stay_all, _use, _find_place)
_LOOK_AHEAD = Hot(_look_ahead)
