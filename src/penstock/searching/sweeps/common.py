"""The common part of constructions in sweeps: they run an action, and fill the time before it with W.

An action that waits for a message leaves its rank a gap. W that end within the gap run there. One more W may run over
its end: that delays the action, but its own time does not come later. Idle time decides. A step takes as long
as the rank that idles most, so a rank may idle as long as it does not become that one (arXiv 2401.10241, section 3.1).
"""

from typing import Any, NamedTuple

import numpy as np

from penstock.searching.problem import INPUT, Problem
from penstock.searching.sequences import Columns, Timing, earliest_s, put


class Sweep(NamedTuple):
    """A construction in progress: its sequence so far, and what its ranks have run."""

    num_ranks: int
    num_microbatches: int
    num_run: Any
    """[3, num_stages] by plane, how many microbatches have run."""
    idle_s: Any
    """[num_ranks] seconds that each rank has idled since its first action."""
    allowed_s: Any
    """[num_ranks] idle time of an earlier construction, which may be used again; zeros for none."""
    weights: Any
    """[num_ranks, stages a rank x num_microbatches] the W whose I has run, in the order of these I."""
    weight_range: Any
    """[num_ranks, 2] the begin and the end, in `weights`, of those that have not run."""
    sequence: Any
    """[num_actions] the actions in the order in which they run."""
    length: Any
    """[1] how many actions of the sequence there are."""

    @classmethod
    def of(cls, problem: Problem, allowed_s: Any = None) -> "Sweep":
        """Return a construction without actions."""
        ranks, stages, microbatches = problem.num_ranks, problem.num_stages, problem.num_microbatches
        return cls(
            num_ranks=ranks,
            num_microbatches=microbatches,
            num_run=np.zeros((3, stages), np.int64),
            idle_s=np.zeros(ranks),
            allowed_s=np.zeros(ranks) if allowed_s is None else allowed_s,
            weights=np.zeros((ranks, stages // ranks * microbatches), np.int64),
            weight_range=np.zeros((ranks, 2), np.int64),
            sequence=np.zeros(problem.num_actions, np.int32),
            length=np.zeros(1, np.int64),
        )


def next_of(sweep: Sweep, plane: int, stage: int) -> int:
    """Return the next action of a plane of a stage."""
    num_stages = sweep.num_run.shape[1]
    return int((plane * num_stages + stage) * sweep.num_microbatches + sweep.num_run[plane, stage])


def has_more(sweep: Sweep, plane: int, stage: int) -> bool:
    return bool(sweep.num_run[plane, stage] < sweep.num_microbatches)


def do(columns: Columns, sweep: Sweep, timing: Timing, action: int) -> None:
    """Run an action now, or as soon as what it waits for is there."""
    rank = columns.rank[action]
    start_s = earliest_s(columns, timing, action)
    if timing.free_s[rank] < 0.0:
        timing.first_s[rank] = start_s
    else:
        sweep.idle_s[rank] += start_s - timing.free_s[rank]
    put(columns, timing, action, start_s)
    sweep.sequence[sweep.length[0]] = action
    sweep.length[0] += 1
    plane_size = sweep.num_run.shape[1] * sweep.num_microbatches
    plane = action // plane_size
    sweep.num_run[plane, (action - plane * plane_size) // sweep.num_microbatches] += 1
    if plane == INPUT:
        sweep.weights[rank, sweep.weight_range[rank, 1]] = action + plane_size
        sweep.weight_range[rank, 1] += 1


def has_weight(sweep: Sweep, rank: int) -> bool:
    return bool(sweep.weight_range[rank, 0] < sweep.weight_range[rank, 1])


def can_weigh(columns: Columns, sweep: Sweep, timing: Timing, rank: int) -> bool:
    """Whether a W waits on a rank, and its workspace fits into memory."""
    if not has_weight(sweep, rank):
        return False
    workspace_bytes = columns.taken_bytes[sweep.weights[rank, sweep.weight_range[rank, 0]]]
    return bool(workspace_bytes == 0 or timing.held_bytes[rank] + workspace_bytes <= columns.limit[rank])


def do_weight(columns: Columns, sweep: Sweep, timing: Timing, rank: int) -> None:
    """Run the W that has waited longest."""
    action = sweep.weights[rank, sweep.weight_range[rank, 0]]
    sweep.weight_range[rank, 0] += 1
    do(columns, sweep, timing, action)


def make_room(columns: Columns, sweep: Sweep, timing: Timing, action: int) -> bool:
    """Run W until an action fits into memory; return whether it does."""
    rank = columns.rank[action]
    while timing.held_bytes[rank] + columns.room_bytes[action] > columns.limit[rank]:
        if not can_weigh(columns, sweep, timing, rank):
            return False
        do_weight(columns, sweep, timing, rank)
    return True


def fill(columns: Columns, sweep: Sweep, timing: Timing, action: int, is_over: bool, is_within: bool) -> None:
    """Run W in the gap before an action, and maybe one more W over the end of the gap.

    That W runs if `is_over` where the gap would make the rank the one that idles most, else if `is_within`.
    """
    rank = columns.rank[action]
    start_s = earliest_s(columns, timing, action)
    while can_weigh(columns, sweep, timing, rank):
        weight = sweep.weights[rank, sweep.weight_range[rank, 0]]
        if timing.free_s[rank] + columns.seconds[weight] > start_s:
            break
        do_weight(columns, sweep, timing, rank)
    gap_s = start_s - timing.free_s[rank]
    if gap_s <= 0.0 or not can_weigh(columns, sweep, timing, rank):
        return
    idles_most = gap_s > most_idle_s(sweep, rank) - sweep.idle_s[rank]
    if (idles_most and is_over) or (not idles_most and is_within):
        do_weight(columns, sweep, timing, rank)


def most_idle_s(sweep: Sweep, rank: int) -> float:
    """Return the idle time that a rank may come to: that of the rank that idles most, or what it is allowed."""
    most_s = 0.0
    allowed_s = 0.0
    for other_rank in range(sweep.num_ranks):
        if sweep.idle_s[other_rank] > most_s:
            most_s = sweep.idle_s[other_rank]
        if sweep.allowed_s[other_rank] > allowed_s:
            allowed_s = sweep.allowed_s[other_rank]
    if allowed_s - sweep.allowed_s[rank] > most_s and allowed_s > 0.0:
        most_s = allowed_s - sweep.allowed_s[rank]
    return float(most_s)


def flush(columns: Columns, sweep: Sweep, timing: Timing, rank: int) -> None:
    """Run the W that still wait on a rank."""
    while has_weight(sweep, rank):
        do_weight(columns, sweep, timing, rank)


HELPERS = (
    flush,
    fill,
    make_room,
    most_idle_s,
    do_weight,
    can_weigh,
    has_weight,
    do,
    has_more,
    next_of,
    earliest_s,
    put,
)
"""The functions that compiled sweeps call, each before those that it calls itself."""
