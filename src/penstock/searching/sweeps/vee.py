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
from penstock.searching.problem import FORWARD, INPUT, Ints, Problem
from penstock.searching.sequences import Columns, Timing, clear, earliest_s
from penstock.searching.sweeps.common import HELPERS, Sweep, do, fill, flush, has_more, make_room, next_of

MOST_SPARE = 4
"""Activations that the F before the first I leave free on a rank at most, where uneven stages need them later."""


def vee_sweeps(problem: Problem) -> Iterator[Ints | None]:
    """Yield the sequences of each of the four settings; None where memory leaves no way."""
    for setting in product((True, False), repeat=2):
        num_spare, sweep = next(
            ((number, sweep) for number in range(MOST_SPARE + 1) if (sweep := _sweep_with(problem, setting, number))),
            (0, None),
        )
        most_s = math.inf
        while sweep is not None:
            yield sweep.sequence
            if sweep.idle_s.max() >= most_s:
                break
            most_s = sweep.idle_s.max()
            sweep = _sweep_with(problem, setting, num_spare, sweep.idle_s)
        else:
            yield None


def _sweep_with(problem: Problem, setting: tuple[bool, ...], num_spare: int, allowed_s: Any = None) -> Sweep | None:
    columns, sweep, timing = Columns.of(problem), Sweep.of(problem, allowed_s), Timing.of(problem)
    stages = np.zeros(problem.num_ranks, np.int64)
    is_complete = _SWEEP.compiled(columns, sweep, timing, *setting, num_spare, stages)
    return sweep if is_complete else None


def _sweep_vee(
    columns: Columns,
    sweep: Sweep,
    timing: Timing,
    fills_forwards: bool,
    fills_inputs: bool,
    num_spare: int,
    stages: Any,
) -> bool:
    """Write all actions into `sweep.sequence`, a schedule on a V; return False where memory leaves no way.

    On a V, rank r has the stages r and 2p - 1 - r. `fills_forwards` and `fills_inputs` say whether a weight gradient
    may delay a forward, or an input gradient of a later stage, on a rank that would else idle most. `num_spare` is how
    many activations each rank leaves free in the warm-up. `stages` [num_ranks] is memory for this function.
    """
    clear(timing)
    for action in range(len(timing.arrival_s)):
        timing.arrival_s[action] = -1.0  # -1: the action has not run
    num_ranks = sweep.num_ranks
    if not _warm_up(columns, sweep, timing, num_spare):
        return False
    # In each round every rank runs one input gradient and then one forward, until all input gradients have run. A round
    # in which nothing runs ends the sweep, since all further rounds would be like it.
    while sweep.num_run[INPUT, 0] < sweep.num_microbatches or sweep.num_run[INPUT, num_ranks] < sweep.num_microbatches:
        length = sweep.length[0]
        if not _run_inputs(columns, sweep, timing, fills_inputs, stages):
            return False
        if not _run_forwards(columns, sweep, timing, fills_forwards) or sweep.length[0] == length:
            return False
    for rank in range(num_ranks):
        flush(columns, sweep, timing, rank)
    return bool(sweep.length[0] == len(sweep.sequence))


def _later_stage(sweep: Sweep, rank: int) -> int:
    """Return the later stage of a rank."""
    return int(2 * sweep.num_ranks - 1 - rank)


def _warm_up(columns: Columns, sweep: Sweep, timing: Timing, num_spare: int) -> bool:
    """Run what comes before the first I: F of the earlier stages while the first microbatch comes back to a rank.

    Then ranks run F of both stages in turn until each has run as many as the one before it.
    """
    num_ranks = sweep.num_ranks
    for rank in range(num_ranks):
        if not _run_next(columns, sweep, timing, FORWARD, rank):
            return False
    for rank in range(num_ranks - 1, -1, -1):
        late = _later_stage(sweep, rank)
        while rank < num_ranks - 1 and _fits_before_return(columns, sweep, timing, rank, num_spare):
            if not _run_forward_of_each(columns, sweep, timing, 0, rank + 1, 1, False):
                return False
        if not _run_next(columns, sweep, timing, FORWARD, late):
            return False
    takes_late = False
    for rank in range(1, num_ranks):
        while _has_fewer_forwards(sweep, rank):
            if not _run_forward_of_each(columns, sweep, timing, num_ranks - 1, rank - 1, -1, takes_late):
                return False
            takes_late = not takes_late
    return True


def _run_forward_of_each(
    columns: Columns, sweep: Sweep, timing: Timing, first: int, end: int, step: int, takes_late: bool
) -> bool:
    """Run an F of the later or the earlier stage of each of these ranks; return whether that could be done."""
    for rank in range(first, end, step):
        stage = _later_stage(sweep, rank) if takes_late else rank
        if has_more(sweep, FORWARD, stage) and not _run_next(columns, sweep, timing, FORWARD, stage):
            return False
    return True


def _fits_before_return(columns: Columns, sweep: Sweep, timing: Timing, rank: int, num_spare: int) -> bool:
    """Whether all ranks up to one can run an F more before the first microbatch comes back to it."""
    action = next_of(sweep, FORWARD, rank)
    if sweep.num_run[FORWARD, rank] >= sweep.num_microbatches - rank:
        return False
    kept_bytes = columns.taken_bytes[action] - columns.freed_bytes[action]
    num_bytes = kept_bytes * (1 + 2 * rank + num_spare) + columns.room_bytes[action]
    if timing.held_bytes[rank] + num_bytes > columns.limit[rank]:
        return False
    back_s = earliest_s(columns, timing, next_of(sweep, FORWARD, _later_stage(sweep, rank)))
    return bool(timing.free_s[rank] + columns.seconds[action] <= back_s)


def _has_fewer_forwards(sweep: Sweep, rank: int) -> bool:
    """Whether a rank has run fewer F than the one before it."""
    late = sweep.num_run[FORWARD, _later_stage(sweep, rank)]
    late_of_previous = sweep.num_run[FORWARD, _later_stage(sweep, rank - 1)]
    if sweep.num_run[FORWARD, rank] + late < sweep.num_run[FORWARD, rank - 1] + late_of_previous:
        return True
    return bool(late <= late_of_previous and late_of_previous < sweep.num_microbatches)


def _run_next(columns: Columns, sweep: Sweep, timing: Timing, plane: int, stage: int) -> bool:
    """Run the next action of a stage; return whether it fits and what it waits for has run."""
    if not has_more(sweep, plane, stage):
        return False
    action = next_of(sweep, plane, stage)
    if not _can_run(columns, timing, action) or not make_room(columns, sweep, timing, action):
        return False
    do(columns, sweep, timing, action)
    return True


def _can_run(columns: Columns, timing: Timing, action: int) -> bool:
    """Whether what an action waits for has run."""
    for source in (columns.source[action], columns.activation_source[action]):
        if source >= 0 and timing.arrival_s[source] < 0.0:
            return False
    return True


def _run_inputs(columns: Columns, sweep: Sweep, timing: Timing, fills_inputs: bool, stages: Any) -> bool:
    """Run one I of each rank that has one; return whether memory allows it."""
    num_ranks = sweep.num_ranks
    for rank in range(num_ranks):
        late = _later_stage(sweep, rank)
        is_early = sweep.num_run[INPUT, rank] < sweep.num_run[INPUT, late]
        if is_early and rank < num_ranks - 1 and has_more(sweep, INPUT, late):
            is_early = sweep.num_run[INPUT, rank + 1] > sweep.num_run[INPUT, rank]
        stages[rank] = rank if is_early else late
    for rank in range(num_ranks - 1, -1, -1):
        if stages[rank] == rank and not _run_input(columns, sweep, timing, rank, True):
            return False
    for rank in range(num_ranks):
        if stages[rank] != rank and not _run_input(columns, sweep, timing, stages[rank], fills_inputs):
            return False
    return True


def _run_input(columns: Columns, sweep: Sweep, timing: Timing, stage: int, is_over: bool) -> bool:
    """Run the next I of a stage, if what it waits for has run; return whether memory allows it."""
    if not has_more(sweep, INPUT, stage):
        return True
    action = next_of(sweep, INPUT, stage)
    if not _can_run(columns, timing, action):  # a later round runs it, because uneven stages fall behind
        return True
    fill(columns, sweep, timing, action, is_over, False)
    return _run_next(columns, sweep, timing, INPUT, stage)


def _run_forwards(columns: Columns, sweep: Sweep, timing: Timing, fills_forwards: bool) -> bool:
    """Run one F of each rank that has one; return whether memory allows it."""
    num_ranks = sweep.num_ranks
    for rank in range(num_ranks):
        late = _later_stage(sweep, rank)
        is_back = sweep.num_run[FORWARD, late] < sweep.num_run[FORWARD, rank]
        if is_back and rank < num_ranks - 1:
            is_back = sweep.num_run[FORWARD, late - 1] > sweep.num_run[FORWARD, late]
        stage = late if is_back else rank
        if not has_more(sweep, FORWARD, stage):
            continue
        action = next_of(sweep, FORWARD, stage)
        if not _can_run(columns, timing, action):
            continue
        if not make_room(columns, sweep, timing, action):
            return False
        fill(columns, sweep, timing, action, fills_forwards, False)
        do(columns, sweep, timing, action)
    return True


_HELPERS = (
    _warm_up,
    _run_forward_of_each,
    _run_inputs,
    _run_forwards,
    _run_input,
    _fits_before_return,
    _has_fewer_forwards,
    _run_next,
    _can_run,
    _later_stage,
)
_SWEEP = Hot(_sweep_vee, *_HELPERS, *HELPERS, clear)
