"""List scheduling: puts actions one behind the other, each time the one that can start first by the rules of a setting.

A rank that is free has up to three kinds of work for each of its stages: the next F, the next I and the next W, each in
the order of microbatches. It takes what is ready; of several, by the setting, an I or an F first, and a W only where
nothing else is ready soon. Memory can keep an F back. With several stages a rank, an F is kept back as well where it
would take the room that the oldest unfinished microbatch needs to come to its end, which else may never come.

The rules are those of the zero-bubble scheduler (arXiv 2401.10241, section 3.1), with its choices as settings, and of
controllable memory (arXiv 2405.15362): how many microbatches are under way on a rank.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.ir.hot import Hot
from penstock.searching.problem import Ints, Problem, Seconds
from penstock.searching.sequences import Columns, Timing, clear, earliest_s, put

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """Choices of a list schedule."""

    most_under_way: Ints
    """[num_stages] forwards of a stage whose I has not run, at most; a limit of memory holds besides."""
    prefers_inputs: Bools
    """[num_ranks] of an F and an I that are both ready, whether the I goes first."""
    waits_for_share: Seconds
    """[num_ranks] a W may hold an F or an I back by at most so large a share of its own seconds."""
    deep_first: Bools
    """[num_ranks] of several stages, whether the later one goes first."""


class _Work(NamedTuple):
    """The loop's knowledge of a setting and a placement, and its notes."""

    stages: Any
    """Of rank 0, of rank 1, and so on."""
    offsets: Any
    """[num_ranks + 1] where those of a rank begin."""
    most_under_way: Any
    prefers_inputs: Any
    waits_for_share: Any
    deep_first: Any
    num_microbatches: int
    reached: Any
    """[3, num_stages] by plane, how many microbatches have run."""
    chosen: Any
    """[3] by plane, the action that a rank would run next, -1 for none."""
    ready_s: Any
    """[3] when it could."""
    neighbours: Any
    """[num_stages, 2] the ranks of the stages before and behind each one, or its own."""
    next_action: Any
    """[num_ranks] what each would run next, -1 for nothing."""
    next_s: Any
    """[num_ranks] when it could."""
    is_changed: Any
    """[num_ranks] whether something has happened since that was found."""


def list_schedule(problem: Problem, setting: Setting) -> Ints | None:
    """Return the sequence of a setting; None where memory leaves no rank anything to do before the end."""
    found = np.empty(problem.num_actions, np.int32)
    of_ranks = problem.placement.stages_of_rank
    timing = Timing.of(problem)
    timing.arrival_s[:] = -1.0  # has not run
    work = _Work(
        np.array([stage for stages in of_ranks for stage in stages], np.int64),
        np.cumsum([0, *map(len, of_ranks)]).astype(np.int64),
        setting.most_under_way.astype(np.int64),
        setting.prefers_inputs,
        setting.waits_for_share,
        setting.deep_first,
        problem.num_microbatches,
        np.zeros((3, problem.num_stages), np.int64),
        np.zeros(3, np.int64),
        np.zeros(3),
        _neighbours(problem),
        np.full(problem.num_ranks, -1, np.int64),
        np.zeros(problem.num_ranks),
        np.ones(problem.num_ranks, np.bool_),
    )
    count = _LIST.compiled(Columns.of(problem), work, timing, found)
    return found if count == problem.num_actions else None


def _neighbours(problem: Problem) -> NDArray[np.int64]:
    placement = problem.placement
    ranks = np.array(placement.rank_of_stage)
    own = np.arange(problem.num_stages)
    both = [np.where(np.array(stages) < 0, own, stages) for stages in (placement.previous_stage, placement.next_stage)]
    return np.ascontiguousarray(ranks[np.stack(both, axis=1)], np.int64)


def _oldest(work: Any, own: int) -> int:
    """Return the oldest microbatch that a rank has not brought to its last I; their number where there is none."""
    oldest = work.num_microbatches
    for place in range(work.offsets[own], work.offsets[own + 1]):
        if work.reached[1, work.stages[place]] < oldest:
            oldest = work.reached[1, work.stages[place]]
    return int(oldest)


def _room_of(of: Any, work: Any, own: int, microbatch: int) -> int:
    """Return the bytes that a microbatch has yet to take on a rank."""
    room = 0
    for place in range(work.offsets[own], work.offsets[own + 1]):
        stage = work.stages[place]
        if microbatch < work.num_microbatches and work.reached[0, stage] <= microbatch:
            room += of.taken[stage * work.num_microbatches + microbatch]
    return int(room)


def _may_forward(of: Any, work: Any, timing: Any, own: int, stage: int, action: int) -> bool:
    """Whether a forward may run by the numbers under way and by memory, with room left for the oldest microbatch."""
    microbatch = work.reached[0, stage]
    if microbatch - work.reached[1, stage] >= work.most_under_way[stage]:
        return False
    needs = timing.held[own] + of.taken[action]
    if needs > of.limit[own]:
        return False
    oldest = _oldest(work, own)
    return bool(microbatch <= oldest or needs + _room_of(of, work, own, oldest) <= of.limit[own])


def _ready(of: Any, work: Any, timing: Any, plane: int, stage: int, own: int) -> float:
    """Return when the next action of a stage could start; below 0 where it cannot yet."""
    microbatch = work.reached[plane, stage]
    if microbatch == work.num_microbatches or (plane > 0 and work.reached[plane - 1, stage] <= microbatch):
        return -1.0
    action = (plane * len(work.stages) + stage) * work.num_microbatches + microbatch
    before = of.source[action]
    if before >= 0 and timing.arrival_s[before] < 0.0:
        return -1.0
    if plane == 0:
        if not _may_forward(of, work, timing, own, stage, action):
            return -1.0
    elif timing.held[own] + of.taken[action] > of.limit[own]:
        return -1.0
    return earliest_s(of, timing, action)


def _look(of: Any, work: Any, timing: Any, own: int) -> None:
    """Find the next F, I and W of a rank."""
    for plane in range(3):
        work.chosen[plane] = -1
        work.ready_s[plane] = 1e300
        for place in range(work.offsets[own], work.offsets[own + 1]):
            stage = work.stages[place]
            at = _ready(of, work, timing, plane, stage, own)
            if at >= 0.0 and (at < work.ready_s[plane] or (at == work.ready_s[plane] and work.deep_first[own])):
                action = (plane * len(work.stages) + stage) * work.num_microbatches + work.reached[plane, stage]
                work.chosen[plane] = action
                work.ready_s[plane] = at


def _choice(of: Any, work: Any, timing: Any, own: int) -> int:
    """Return the plane of what a rank runs next by its setting; -1 where there is nothing to run."""
    first, second = (1, 0) if work.prefers_inputs[own] else (0, 1)
    plane = first
    if work.chosen[first] < 0 or (work.chosen[second] >= 0 and work.ready_s[second] < work.ready_s[first]):
        plane = second
    weight = work.chosen[2]
    if weight >= 0:
        late = timing.free_s[own] + of.seconds[weight] - work.ready_s[plane]
        if work.chosen[plane] < 0 or late <= work.waits_for_share[own] * of.seconds[weight]:
            plane = 2
    return plane if work.chosen[plane] >= 0 else -1


def _list(of: Any, work: Any, timing: Any, found: Any) -> int:
    """Fill a sequence; return how many actions could be put into it."""
    size = len(work.stages) * work.num_microbatches
    clear(timing)
    for number in range(len(found)):
        best = -1
        best_s = 1e300
        for own in range(len(work.next_action)):
            if work.is_changed[own]:
                work.is_changed[own] = False
                _look(of, work, timing, own)
                plane = _choice(of, work, timing, own)
                work.next_action[own] = work.chosen[plane] if plane >= 0 else -1
                work.next_s[own] = work.ready_s[plane]
            if work.next_action[own] >= 0 and work.next_s[own] < best_s:
                best, best_s = work.next_action[own], work.next_s[own]
        if best < 0:
            return number
        plane = best // size
        stage = (best - plane * size) // work.num_microbatches
        work.reached[plane, stage] += 1
        put(of, timing, best, best_s)
        found[number] = best
        work.is_changed[of.rank[best]] = True
        for side in range(2):
            work.is_changed[work.neighbours[stage, side]] = True
    return len(found)


_LIST = Hot(_list, _look, _choice, _ready, _may_forward, _room_of, _oldest, earliest_s, put, clear)
