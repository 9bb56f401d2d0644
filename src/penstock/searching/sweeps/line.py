"""Sweeps of one stage a rank: the zero-bubble scheduler (arXiv 2401.10241, section 3.1).

Each rank first runs as many F as memory and the time until its first I allow, fewer than the rank before it. Then, for
each further microbatch, an F goes down the line, where ranks may leave theirs out, and an I comes back up.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from penstock.ir.hot import Hot
from penstock.searching.problem import FORWARD, INPUT, Ints, Problem
from penstock.searching.sequences import Columns, Timing, clear
from penstock.searching.sweeps.common import HELPERS, Sweep, do, fill, flush, has_more, make_room, most_idle_s, next_of


def line_sweeps(problem: Problem) -> Iterator[Ints | None]:
    """Yield the sequence of each of the eight settings; None where memory leaves no way."""
    columns = Columns.of(problem)
    for setting in product((True, False), repeat=3):
        sweep, timing = Sweep.of(problem), Timing.of(problem)
        forwards = np.zeros(problem.num_ranks, np.int64)
        is_complete = _SWEEP.compiled(columns, sweep, timing, *setting, forwards)
        yield sweep.sequence if is_complete else None


def _sweep_line(
    columns: Columns,
    sweep: Sweep,
    timing: Timing,
    ends_before_input: bool,
    prefers_inputs: bool,
    is_within: bool,
    forwards: Any,
) -> bool:
    """Write all actions into `sweep.sequence`, a zero-bubble schedule; return False where memory leaves no way.

    F is a forward, I an input gradient, W a weight gradient. `ends_before_input`: F of the warm-up must end before the
    first gradient arrives. `prefers_inputs`: a rank leaves an F out that would delay its next I. `is_within`: a W may
    delay the next action on a rank that idles less than others. `forwards` [num_ranks] is memory for this function.
    """
    # The F before the first I of each rank, and this I.
    clear(timing)
    if not _warm_up(columns, sweep, timing, ends_before_input, forwards):
        return False
    num_ranks = sweep.num_ranks
    # For each further microbatch, an F goes down the line of ranks, and an I comes back up.
    for _microbatch in range(1, sweep.num_microbatches):
        _choose_forwards(columns, sweep, timing, prefers_inputs, forwards)
        for rank in range(num_ranks):
            if forwards[rank] and not _run_next(columns, sweep, timing, FORWARD, rank, is_within):
                return False
        for rank in range(num_ranks - 1, -1, -1):
            if not has_input(sweep, rank) or not _run_next(columns, sweep, timing, INPUT, rank, is_within):
                return False
    # The weight gradients that are left.
    for rank in range(num_ranks):
        flush(columns, sweep, timing, rank)
    return True


def _run_next(columns: Columns, sweep: Sweep, timing: Timing, plane: int, rank: int, is_within: bool) -> bool:
    """Run the next F or I of a rank, with W in the time before it; return whether memory allows it."""
    action = next_of(sweep, plane, rank)
    if not make_room(columns, sweep, timing, action):
        return False
    fill(columns, sweep, timing, action, True, is_within)
    if plane == INPUT and rank == 0 and not has_more(sweep, FORWARD, rank):
        flush(columns, sweep, timing, rank)
    do(columns, sweep, timing, action)
    return True


def has_input(sweep: Sweep, rank: int) -> bool:
    """Whether the F of a rank's next I has run."""
    return bool(sweep.num_run[FORWARD, rank] > sweep.num_run[INPUT, rank])


def _warm_up(columns: Columns, sweep: Sweep, timing: Timing, ends_before_input: bool, forwards: Any) -> bool:
    """Run the F before the first I of each rank, and this I; return whether memory allows it."""
    for rank in range(sweep.num_ranks):
        action = next_of(sweep, FORWARD, rank)
        if columns.taken_bytes[action] > columns.limit[rank]:
            return False
        do(columns, sweep, timing, action)
    _count_forwards(columns, sweep, timing, ends_before_input, forwards)
    for rank in range(sweep.num_ranks):
        for _ in range(forwards[rank]):
            do(columns, sweep, timing, next_of(sweep, FORWARD, rank))
    for rank in range(sweep.num_ranks - 1, -1, -1):
        action = next_of(sweep, INPUT, rank)
        if timing.held_bytes[rank] + columns.taken_bytes[action] > columns.limit[rank]:
            return False
        do(columns, sweep, timing, action)
    return True


def _count_forwards(columns: Columns, sweep: Sweep, timing: Timing, ends_before_input: bool, forwards: Any) -> None:
    """Fill `forwards[rank]` with how many F each rank runs after its first F and before its first I.

    It is called when each rank has run the F of microbatch 0 and nothing else. A rank runs as many further F as its
    memory limit allows and as start before the gradient for its first I arrives; with `ends_before_input` they must
    also end before that. No rank runs more than the rank before it.
    """
    input_end_s = 0.0  # when the first I of the next rank ends
    # From the last rank to the first, as gradients travel. The last rank waits for no gradient and runs no further F.
    for rank in range(sweep.num_ranks - 1, -1, -1):
        forwards[rank] = 0
        first_input = next_of(sweep, INPUT, rank)
        gradient_arrival_s = timing.free_s[rank]
        if rank < sweep.num_ranks - 1:
            # `wire_s` is how long the gradient occupies its link, `lag_s` the latency after that.
            gradient_arrival_s = input_end_s + columns.lag_s[first_input] + columns.wire_s[columns.source[first_input]]
        held_bytes, free_s = timing.held_bytes[rank], timing.free_s[rank]
        while sweep.num_run[FORWARD, rank] + forwards[rank] < sweep.num_microbatches and rank < sweep.num_ranks - 1:
            action = next_of(sweep, FORWARD, rank) + forwards[rank]
            if held_bytes + columns.room_bytes[action] > columns.limit[rank]:
                break
            end_s = free_s + columns.seconds[action]
            if free_s >= gradient_arrival_s or (ends_before_input and end_s > gradient_arrival_s):
                break
            held_bytes += columns.taken_bytes[action] - columns.freed_bytes[action]
            free_s = end_s
            forwards[rank] += 1
        input_start_s = free_s if free_s > gradient_arrival_s else gradient_arrival_s
        input_end_s = input_start_s + columns.seconds[first_input]
    # A rank runs one F fewer than the rank before it, but as many where these are all its microbatches.
    for rank in range(1, sweep.num_ranks):
        max_forwards = forwards[rank - 1]
        if max_forwards > 0 and sweep.num_run[FORWARD, rank] + forwards[rank] < sweep.num_microbatches:
            max_forwards -= 1
        if forwards[rank] > max_forwards:
            forwards[rank] = max_forwards


def _choose_forwards(columns: Columns, sweep: Sweep, timing: Timing, prefers_inputs: bool, forwards: Any) -> None:
    """Choose which ranks run an F in this sweep: no rank where the next one runs none, but for its last F."""
    for rank in range(sweep.num_ranks):
        forwards[rank] = 0
        if has_more(sweep, FORWARD, rank):
            is_left_out = prefers_inputs and rank + 1 < sweep.num_ranks and _delays_input(columns, sweep, timing, rank)
            forwards[rank] = 0 if is_left_out else 1
    for rank in range(sweep.num_ranks - 2, -1, -1):
        if forwards[rank + 1] < forwards[rank]:
            forwards[rank] = forwards[rank + 1]


def _delays_input(columns: Columns, sweep: Sweep, timing: Timing, rank: int) -> bool:
    """Return whether a rank should leave out its next F, because the F would delay the rank's next I.

    It should keep the F where the next rank would soon have no F to run (it has run as many, or one fewer), and where
    idling until the I would make this rank the one that idles most.
    """
    next_rank = rank + 1
    if sweep.num_run[FORWARD, rank] < sweep.num_run[FORWARD, next_rank] + 2:
        return False
    # The gradient arrives after the next rank has run its next F and then the I that makes the gradient.
    source, forward = next_of(sweep, INPUT, next_rank), next_of(sweep, FORWARD, rank)
    arrival_s = timing.free_s[next_rank] + columns.seconds[next_of(sweep, FORWARD, next_rank)] + columns.seconds[source]
    arrival_s += columns.lag_s[next_of(sweep, INPUT, rank)] + columns.wire_s[source]
    if timing.free_s[rank] >= arrival_s:
        return True
    # Where memory is full, W run before the F and make it end later.
    end_s = timing.free_s[rank] + columns.seconds[forward]
    held_bytes = timing.held_bytes[rank] + columns.room_bytes[forward]
    index = sweep.weight_range[rank, 0]
    while held_bytes > columns.limit[rank] and index < sweep.weight_range[rank, 1]:
        weight = sweep.weights[rank, index]
        end_s += columns.seconds[weight]
        held_bytes -= columns.freed_bytes[weight] - columns.taken_bytes[weight]
        index += 1
    if end_s <= arrival_s:
        return False
    return bool(arrival_s - timing.free_s[rank] <= most_idle_s(sweep, rank) - sweep.idle_s[rank])


_HELPERS = (_run_next, _warm_up, _count_forwards, _choose_forwards, _delays_input, has_input)
_SWEEP = Hot(_sweep_line, *_HELPERS, *HELPERS, clear)
