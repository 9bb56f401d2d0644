"""Sweeps of one stage a rank: the zero-bubble scheduler (arXiv 2401.10241, section 3.1).

Each rank first runs as many F as memory and the time until its first I allow, fewer than the rank before it. Then, for
each further microbatch, an F goes down the line, where ranks may leave theirs out, and an I comes back up.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from penstock.ir.hot import Hot
from penstock.searching.problem import Ints, Problem
from penstock.searching.sequences import Columns, Timing, clear
from penstock.searching.sweeps.common import (
    HELPERS,
    Sweep,
    do,
    fill,
    flush,
    has_more,
    make_room,
    most_idle_s,
    next_of,
)


def line_sweeps(problem: Problem) -> Iterator[Ints | None]:
    """Yield the sequence of each of the eight settings; None where memory leaves no way."""
    columns = Columns.of(problem)
    for setting in product((True, False), repeat=3):
        sweep, timing = Sweep.of(problem), Timing.of(problem)
        extra = np.zeros(problem.num_ranks, np.int64)
        is_complete = _SWEEP.compiled(columns, sweep, timing, *setting, extra)
        yield sweep.found if is_complete else None


def _sweep_line(
    of: Any, sweep: Any, timing: Any, ends_before_input: bool, prefers_inputs: bool, is_within: bool, extra: Any
) -> bool:
    """Fill a sequence; return whether it could be completed. `extra` is room for the F of each rank in a sweep."""
    clear(timing)
    if not _warm_up(of, sweep, timing, ends_before_input, extra):
        return False
    num_ranks = sweep.num_ranks
    for _microbatch in range(1, sweep.num_microbatches):
        _choose_forwards(of, sweep, timing, prefers_inputs, extra)
        for rank in range(num_ranks):
            if extra[rank] and not _run(of, sweep, timing, 0, rank, is_within):
                return False
        for rank in range(num_ranks - 1, -1, -1):
            if not has_input(sweep, rank) or not _run(of, sweep, timing, 1, rank, is_within):
                return False
    for rank in range(num_ranks):
        flush(of, sweep, timing, rank)
    return True


def _run(of: Any, sweep: Any, timing: Any, plane: int, rank: int, is_within: bool) -> bool:
    """Run the next F or I of a rank, with W in the time before it; return whether memory allows it."""
    action = next_of(sweep, plane, rank)
    if not make_room(of, sweep, timing, action):
        return False
    fill(of, sweep, timing, action, True, is_within)
    if plane == 1 and rank == 0 and not has_more(sweep, 0, rank):
        flush(of, sweep, timing, rank)
    do(of, sweep, timing, action)
    return True


def has_input(sweep: Any, rank: int) -> bool:
    """Whether the F of a rank's next I has run."""
    return bool(sweep.reached[0, rank] > sweep.reached[1, rank])


def _warm_up(of: Any, sweep: Any, timing: Any, ends_before_input: bool, extra: Any) -> bool:
    """Run the F before the first I of each rank, and this I; return whether memory allows it."""
    for rank in range(sweep.num_ranks):
        action = next_of(sweep, 0, rank)
        if of.taken[action] > of.limit[rank]:
            return False
        do(of, sweep, timing, action)
    _count_extra(of, sweep, timing, ends_before_input, extra)
    for rank in range(sweep.num_ranks):
        for _ in range(extra[rank]):
            do(of, sweep, timing, next_of(sweep, 0, rank))
    for rank in range(sweep.num_ranks - 1, -1, -1):
        action = next_of(sweep, 1, rank)
        if timing.held[rank] + of.taken[action] > of.limit[rank]:
            return False
        do(of, sweep, timing, action)
    return True


def _count_extra(of: Any, sweep: Any, timing: Any, ends_before_input: bool, extra: Any) -> None:
    """Count the F that each rank runs between the F and the I of the first microbatch."""
    inputs_s = 0.0  # when the I of the rank behind ends
    for rank in range(sweep.num_ranks - 1, -1, -1):
        extra[rank] = 0
        first = next_of(sweep, 1, rank)
        starts_s = timing.free_s[rank]
        if rank < sweep.num_ranks - 1:
            starts_s = inputs_s + of.lag_s[first] + of.wire_s[of.source[first]]
        held, at_s = timing.held[rank], timing.free_s[rank]
        while sweep.reached[0, rank] + extra[rank] < sweep.num_microbatches and rank < sweep.num_ranks - 1:
            action = next_of(sweep, 0, rank) + extra[rank]
            if held + of.taken[action] > of.limit[rank]:
                break
            if at_s >= starts_s or (ends_before_input and at_s + of.seconds[action] > starts_s):
                break
            held += of.taken[action]
            at_s += of.seconds[action]
            extra[rank] += 1
        inputs_s = (at_s if at_s > starts_s else starts_s) + of.seconds[first]
    for rank in range(1, sweep.num_ranks):
        most = extra[rank - 1]
        if most > 0 and sweep.reached[0, rank] + extra[rank] < sweep.num_microbatches:
            most -= 1
        if extra[rank] > most:
            extra[rank] = most


def _choose_forwards(of: Any, sweep: Any, timing: Any, prefers_inputs: bool, extra: Any) -> None:
    """Choose which ranks run an F in this sweep: no rank where the one behind it runs none, but for its last F."""
    for rank in range(sweep.num_ranks):
        extra[rank] = 0
        if has_more(sweep, 0, rank):
            is_left_out = prefers_inputs and rank + 1 < sweep.num_ranks and _delays_input(of, sweep, timing, rank)
            extra[rank] = 0 if is_left_out else 1
    for rank in range(sweep.num_ranks - 2, -1, -1):
        if extra[rank + 1] < extra[rank]:
            extra[rank] = extra[rank + 1]


def _delays_input(of: Any, sweep: Any, timing: Any, rank: int) -> bool:
    """Whether an F of a rank would delay its next I, and idling until then does not make it the one that idles most."""
    behind = rank + 1
    if sweep.reached[0, rank] < sweep.reached[0, behind] + 2:
        return False
    source = next_of(sweep, 1, behind)
    forward = next_of(sweep, 0, rank)
    comes_s = timing.free_s[behind] + of.seconds[next_of(sweep, 0, behind)] + of.seconds[source]
    comes_s += of.lag_s[next_of(sweep, 1, rank)] + of.wire_s[source]
    if timing.free_s[rank] >= comes_s:
        return True
    ends_s = timing.free_s[rank] + of.seconds[forward]
    held = timing.held[rank] + of.taken[forward]
    place = sweep.num_waiting[rank, 0]
    while held > of.limit[rank] and place < sweep.num_waiting[rank, 1]:
        weight = sweep.waiting[rank, place]
        ends_s += of.seconds[weight]
        held -= of.freed[weight]
        place += 1
    if ends_s <= comes_s:
        return False
    return bool(comes_s - timing.free_s[rank] <= most_idle_s(sweep, rank) - sweep.idle_s[rank])


_HELPERS = (_run, _warm_up, _count_extra, _choose_forwards, _delays_input, has_input)
_SWEEP = Hot(_sweep_line, *_HELPERS, *HELPERS, clear)
