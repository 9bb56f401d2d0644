"""The common part of constructions in sweeps: they run an action, and fill the time before it with W.

An action that waits for a message leaves its rank a gap. W that end within the gap run there. One more W may run over
its end: that delays the action, but its own time does not come later. Idle time decides. A step takes as long
as the rank that idles most, so a rank may idle as long as it does not become that one (arXiv 2401.10241, section 3.1).
"""

from typing import Any, NamedTuple

import numpy as np

from penstock.searching.problem import Problem
from penstock.searching.sequences import earliest_s, put


class Sweep(NamedTuple):
    """The knowledge of a construction, and its notes."""

    num_ranks: int
    num_microbatches: int
    reached: Any
    """[3, num_stages] by plane, how many microbatches have run."""
    idle_s: Any
    """[num_ranks] since the rank's first action."""
    allowed_s: Any
    """[num_ranks] idle time of an earlier construction, which may be used again; zeros for none."""
    waiting: Any
    """[num_ranks, stages a rank x num_microbatches] W whose I has run, in the order of these."""
    num_waiting: Any
    """[num_ranks, 2] how many of them have run, and how many there have been."""
    found: Any
    """[num_actions] the sequence."""
    num_found: Any
    """[1]"""

    @classmethod
    def of(cls, problem: Problem, allowed_s: Any = None) -> "Sweep":
        """Begin one."""
        ranks, stages, microbatches = problem.num_ranks, problem.num_stages, problem.num_microbatches
        return cls(
            ranks,
            microbatches,
            np.zeros((3, stages), np.int64),
            np.zeros(ranks),
            np.zeros(ranks) if allowed_s is None else allowed_s,
            np.zeros((ranks, stages // ranks * microbatches), np.int64),
            np.zeros((ranks, 2), np.int64),
            np.zeros(problem.num_actions, np.int32),
            np.zeros(1, np.int64),
        )


def next_of(sweep: Any, plane: int, stage: int) -> int:
    """Return the next action of a stage."""
    num_stages = sweep.reached.shape[1]
    return int((plane * num_stages + stage) * sweep.num_microbatches + sweep.reached[plane, stage])


def has_more(sweep: Any, plane: int, stage: int) -> bool:
    return bool(sweep.reached[plane, stage] < sweep.num_microbatches)


def do(of: Any, sweep: Any, timing: Any, action: int) -> None:
    """Run an action now, or as soon as what it waits for is there."""
    own = of.rank[action]
    at = earliest_s(of, timing, action)
    if timing.free_s[own] < 0.0:
        timing.first_s[own] = at
    else:
        sweep.idle_s[own] += at - timing.free_s[own]
    put(of, timing, action, at)
    sweep.found[sweep.num_found[0]] = action
    sweep.num_found[0] += 1
    size = sweep.reached.shape[1] * sweep.num_microbatches
    plane = action // size
    sweep.reached[plane, (action - plane * size) // sweep.num_microbatches] += 1
    if plane == 1:
        sweep.waiting[own, sweep.num_waiting[own, 1]] = action + size
        sweep.num_waiting[own, 1] += 1


def has_weight(sweep: Any, own: int) -> bool:
    return bool(sweep.num_waiting[own, 0] < sweep.num_waiting[own, 1])


def do_weight(of: Any, sweep: Any, timing: Any, own: int) -> None:
    """Run the W that has waited longest."""
    action = sweep.waiting[own, sweep.num_waiting[own, 0]]
    sweep.num_waiting[own, 0] += 1
    do(of, sweep, timing, action)


def make_room(of: Any, sweep: Any, timing: Any, action: int) -> bool:
    """Run W until an action fits into memory; return whether it does."""
    own = of.rank[action]
    while timing.held[own] + of.taken[action] > of.limit[own]:
        if not has_weight(sweep, own):
            return False
        do_weight(of, sweep, timing, own)
    return True


def fill(of: Any, sweep: Any, timing: Any, action: int, is_over: bool, is_within: bool) -> None:
    """Run W in the gap before an action, and one over its end.

    That one runs if `is_over` where the gap would make the rank the one that idles most, else if `is_within`.
    """
    own = of.rank[action]
    starts_s = earliest_s(of, timing, action)
    while has_weight(sweep, own):
        weight = sweep.waiting[own, sweep.num_waiting[own, 0]]
        if timing.free_s[own] + of.seconds[weight] > starts_s:
            break
        do_weight(of, sweep, timing, own)
    gap_s = starts_s - timing.free_s[own]
    if gap_s <= 0.0 or not has_weight(sweep, own):
        return
    idles_most = gap_s > most_idle_s(sweep, own) - sweep.idle_s[own]
    if (idles_most and is_over) or (not idles_most and is_within):
        do_weight(of, sweep, timing, own)


def most_idle_s(sweep: Any, own: int) -> float:
    """Return the idle time that a rank may come to: that of the rank that idles most, or what it is allowed."""
    most_s = 0.0
    allowed_s = 0.0
    for rank in range(sweep.num_ranks):
        if sweep.idle_s[rank] > most_s:
            most_s = sweep.idle_s[rank]
        if sweep.allowed_s[rank] > allowed_s:
            allowed_s = sweep.allowed_s[rank]
    if allowed_s - sweep.allowed_s[own] > most_s and allowed_s > 0.0:
        most_s = allowed_s - sweep.allowed_s[own]
    return float(most_s)


def flush(of: Any, sweep: Any, timing: Any, own: int) -> None:
    """Run the W that still wait on a rank."""
    while has_weight(sweep, own):
        do_weight(of, sweep, timing, own)


HELPERS = (flush, fill, make_room, most_idle_s, do_weight, has_weight, do, has_more, next_of, earliest_s, put)
"""Callers first."""
