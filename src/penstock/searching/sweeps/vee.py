"""Sweeps of two stages a rank in a V: the scheduler of ZB-V (arXiv 2401.10241, section 6).

Rank r has the stages r and 2p - 1 - r. In each round every rank runs one I and then one F: of its later stage where the
microbatch has come back to it, else of its earlier one. Each setting runs again, with ranks that may idle as long as
they did before, while that helps.
"""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from penstock.ir.hot import Hot
from penstock.searching.problem import Ints, Problem
from penstock.searching.sequences import Columns, Timing, clear, earliest_s
from penstock.searching.sweeps.common import (
    HELPERS,
    Sweep,
    do,
    fill,
    flush,
    has_more,
    make_room,
    next_of,
)

MOST_SPARE = 4
"""Activations that the F before the first I leave free on a rank at most, where uneven stages need them later."""


def vee_sweeps(problem: Problem) -> Iterator[Ints | None]:
    """Yield the sequences of each of the four settings; None where memory leaves no way."""
    for setting in product((True, False), repeat=2):
        num_spare, sweep = next(
            ((number, sweep) for number in range(MOST_SPARE + 1) if (sweep := _swept(problem, setting, number))),
            (0, None),
        )
        most_s = math.inf
        while sweep is not None:
            yield sweep.found
            if sweep.idle_s.max() >= most_s:
                break
            most_s = sweep.idle_s.max()
            sweep = _swept(problem, setting, num_spare, sweep.idle_s)
        else:
            yield None


def _swept(problem: Problem, setting: tuple[bool, ...], num_spare: int, allowed_s: Any = None) -> Sweep | None:
    columns, sweep, timing = Columns.of(problem), Sweep.of(problem, allowed_s), Timing.of(problem)
    chosen = np.zeros(problem.num_ranks, np.int64)
    is_complete = _SWEEP.compiled(columns, sweep, timing, *setting, num_spare, chosen)
    return sweep if is_complete else None


def _sweep_vee(
    of: Any, sweep: Any, timing: Any, fills_forwards: bool, fills_inputs: bool, num_spare: int, chosen: Any
) -> bool:
    """Fill a sequence; return whether it could be completed. `chosen` is room for a stage of each rank."""
    clear(timing)
    for action in range(len(timing.arrival_s)):
        timing.arrival_s[action] = -1.0  # has not run
    num_ranks = sweep.num_ranks
    if not _warm_up(of, sweep, timing, num_spare):
        return False
    while sweep.reached[1, 0] < sweep.num_microbatches or sweep.reached[1, num_ranks] < sweep.num_microbatches:
        before = sweep.num_found[0]
        if not _inputs(of, sweep, timing, fills_inputs, chosen) or not _forwards(of, sweep, timing, fills_forwards):
            return False
        if sweep.num_found[0] == before:
            return False
    for rank in range(num_ranks):
        flush(of, sweep, timing, rank)
    return bool(sweep.num_found[0] == len(sweep.found))


def _late(sweep: Any, rank: int) -> int:
    """Return the later stage of a rank."""
    return int(2 * sweep.num_ranks - 1 - rank)


def _warm_up(of: Any, sweep: Any, timing: Any, num_spare: int) -> bool:
    """Run what comes before the first I: F of the earlier stages while the first microbatch comes back to a rank.

    Then ranks run F of both stages in turn until each has run as many as the one before it.
    """
    num_ranks = sweep.num_ranks
    for rank in range(num_ranks):
        if not _put(of, sweep, timing, 0, rank):
            return False
    for rank in range(num_ranks - 1, -1, -1):
        late = _late(sweep, rank)
        while rank < num_ranks - 1 and _has_time(of, sweep, timing, rank, num_spare):
            if not _run_forwards(of, sweep, timing, 0, rank + 1, 1, False):
                return False
        if not _put(of, sweep, timing, 0, late):
            return False
    takes_late = False
    for rank in range(1, num_ranks):
        while _is_behind(sweep, rank):
            if not _run_forwards(of, sweep, timing, num_ranks - 1, rank - 1, -1, takes_late):
                return False
            takes_late = not takes_late
    return True


def _run_forwards(of: Any, sweep: Any, timing: Any, first: int, end: int, step: int, takes_late: bool) -> bool:
    """Run an F of each of some ranks, of the later or the earlier stage; return whether that could be done."""
    for rank in range(first, end, step):
        stage = _late(sweep, rank) if takes_late else rank
        if has_more(sweep, 0, stage) and not _put(of, sweep, timing, 0, stage):
            return False
    return True


def _has_time(of: Any, sweep: Any, timing: Any, rank: int, num_spare: int) -> bool:
    """Whether all ranks up to one can run an F more before the first microbatch comes back to it."""
    action = next_of(sweep, 0, rank)
    if sweep.reached[0, rank] >= sweep.num_microbatches - rank:
        return False
    if timing.held[rank] + of.taken[action] * (2 + 2 * rank + num_spare) > of.limit[rank]:
        return False
    back_s = earliest_s(of, timing, next_of(sweep, 0, _late(sweep, rank)))
    return bool(timing.free_s[rank] + of.seconds[action] <= back_s)


def _is_behind(sweep: Any, rank: int) -> bool:
    """Whether a rank has run fewer F than the one before it."""
    late, late_before = sweep.reached[0, _late(sweep, rank)], sweep.reached[0, _late(sweep, rank - 1)]
    if sweep.reached[0, rank] + late < sweep.reached[0, rank - 1] + late_before:
        return True
    return bool(late <= late_before and late_before < sweep.num_microbatches)


def _put(of: Any, sweep: Any, timing: Any, plane: int, stage: int) -> bool:
    """Run the next action of a stage; return whether it fits and what it waits for has run."""
    if not has_more(sweep, plane, stage):
        return False
    action = next_of(sweep, plane, stage)
    if not _is_open(of, timing, action) or not make_room(of, sweep, timing, action):
        return False
    do(of, sweep, timing, action)
    return True


def _is_open(of: Any, timing: Any, action: int) -> bool:
    """Whether what an action waits for has run."""
    source, saved = of.source[action], of.saved[action]
    return bool((source < 0 or timing.arrival_s[source] >= 0.0) and (saved < 0 or timing.arrival_s[saved] >= 0.0))


def _inputs(of: Any, sweep: Any, timing: Any, fills_inputs: bool, chosen: Any) -> bool:
    """Run one I of each rank that has one; return whether memory allows it."""
    num_ranks = sweep.num_ranks
    for rank in range(num_ranks):
        late = _late(sweep, rank)
        is_early = sweep.reached[1, rank] < sweep.reached[1, late]
        if is_early and rank < num_ranks - 1 and has_more(sweep, 1, late):
            is_early = sweep.reached[1, rank + 1] > sweep.reached[1, rank]
        chosen[rank] = rank if is_early else late
    for rank in range(num_ranks - 1, -1, -1):
        if chosen[rank] == rank and not _input(of, sweep, timing, rank, True):
            return False
    for rank in range(num_ranks):
        if chosen[rank] != rank and not _input(of, sweep, timing, chosen[rank], fills_inputs):
            return False
    return True


def _input(of: Any, sweep: Any, timing: Any, stage: int, is_over: bool) -> bool:
    if not has_more(sweep, 1, stage):
        return True
    action = next_of(sweep, 1, stage)
    if not _is_open(of, timing, action):  # a later round runs it: uneven stages fall behind
        return True
    fill(of, sweep, timing, action, is_over, False)
    return _put(of, sweep, timing, 1, stage)


def _forwards(of: Any, sweep: Any, timing: Any, fills_forwards: bool) -> bool:
    """Run one F of each rank that has one; return whether memory allows it."""
    num_ranks = sweep.num_ranks
    for rank in range(num_ranks):
        late = _late(sweep, rank)
        is_back = sweep.reached[0, late] < sweep.reached[0, rank]
        if is_back and rank < num_ranks - 1:
            is_back = sweep.reached[0, late - 1] > sweep.reached[0, late]
        stage = late if is_back else rank
        if not has_more(sweep, 0, stage):
            continue
        action = next_of(sweep, 0, stage)
        if not _is_open(of, timing, action):
            continue
        if not make_room(of, sweep, timing, action):
            return False
        fill(of, sweep, timing, action, fills_forwards, False)
        do(of, sweep, timing, action)
    return True


_HELPERS = (_warm_up, _run_forwards, _inputs, _forwards, _input, _has_time, _is_behind, _put, _is_open, _late)
_SWEEP = Hot(_sweep_vee, *_HELPERS, *HELPERS, clear)
