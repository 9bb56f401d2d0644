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
from penstock.placement import Placement
from penstock.searching.problem import FORWARD, INPUT, NUM_PLANES, WEIGHT, Ints, Problem, Seconds
from penstock.searching.sequences import Columns, Timing

Bools = NDArray[np.bool_]
NEVER_S = 1e300
"""Later than any time."""
NOT_YET_S = -1.0
"""Earlier than any time: the time of what has not run, or cannot run yet."""


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """The choices of a list schedule."""

    most_under_way: Ints
    """[num_stages] the most forwards of a stage whose I has not run; a limit of memory holds besides."""
    prefers_inputs: Bools
    """[num_ranks] whether the I goes first of an F and an I that are both ready."""
    waits_for_share: Seconds
    """[num_ranks] the largest share of its own seconds by which a W may hold an F or an I back."""
    deep_first: Bools
    """[num_ranks] whether the later one goes first of several stages."""


class ListState(NamedTuple):
    """A setting and a placement, which the loop reads, and columns that it writes: the state of a list schedule."""

    stages: Any
    """The stages of rank 0, then those of rank 1, and so on."""
    offsets: Any
    """[num_ranks + 1] the index in `stages` at which those of a rank begin."""
    neighbours: Any
    """[num_stages, 2] the ranks of the stages before and behind each stage, or the stage's own rank at an end."""
    most_under_way: Any
    prefers_inputs: Any
    waits_for_share: Any
    deep_first: Any
    num_run: Any
    """[3, num_stages] by plane, how many microbatches have run: so the number of the one that runs next."""
    oldest: Any
    """[num_ranks] the oldest microbatch that a rank has not brought to its last I; their number where there is none."""
    missing_bytes: Any
    """[num_ranks] the bytes that the F of this microbatch which have not run need on the rank, and a backward."""
    next_action: Any
    """[num_ranks] the action that each rank would run next, -1 for none."""
    next_s: Any
    """[num_ranks] when this action could start."""
    left_s: Any
    """[num_ranks] the seconds of the actions that a rank has yet to run."""
    most_s: Any
    """[1] the latest end of a schedule that is of use; one that cannot keep it is given up."""
    is_changed: Any
    """[num_ranks] whether something has happened on a rank or beside it since its next action was chosen."""

    @classmethod
    def of(cls, placement: Placement, setting: Setting) -> "ListState":
        """Return the state of a placement, with copies of the columns of a setting."""
        stages_of_rank, num_ranks = placement.stages_of_rank, placement.num_ranks
        return cls(
            stages=np.array([stage for stages in stages_of_rank for stage in stages], np.int64),
            offsets=np.cumsum([0, *map(len, stages_of_rank)]).astype(np.int64),
            neighbours=_neighbours(placement),
            most_under_way=setting.most_under_way.astype(np.int64),
            prefers_inputs=setting.prefers_inputs.copy(),
            waits_for_share=setting.waits_for_share.copy(),
            deep_first=setting.deep_first.copy(),
            num_run=np.zeros((NUM_PLANES, placement.num_stages), np.int64),
            oldest=np.zeros(num_ranks, np.int64),
            missing_bytes=np.zeros(num_ranks, np.int64),
            next_action=np.zeros(num_ranks, np.int64),
            next_s=np.zeros(num_ranks),
            left_s=np.zeros(num_ranks),
            most_s=np.full(1, NEVER_S),
            is_changed=np.zeros(num_ranks, np.bool_),
        )


def list_schedule(problem: Problem, setting: Setting) -> Ints | None:
    """Return the sequence of a setting; None where memory leaves no rank anything to do before the end."""
    sequence = np.empty(problem.num_actions, np.int32)
    state = ListState.of(problem.placement, setting)
    num_actions = _LIST.compiled(Columns.of(problem), state, Timing.of(problem), sequence)
    return sequence if num_actions == problem.num_actions else None


def _neighbours(placement: Placement) -> NDArray[np.int64]:
    stages = np.arange(placement.num_stages)
    neighbours = np.column_stack([placement.previous_stage, placement.next_stage])
    neighbours = np.where(neighbours < 0, stages[:, None], neighbours)
    return np.ascontiguousarray(np.array(placement.rank_of_stage)[neighbours], np.int64)


def _find_oldest(
    rank: int,
    stages: Any,
    offsets: Any,
    num_run: Any,
    taken_bytes: Any,
    freed_bytes: Any,
    room_bytes: Any,
    oldest: Any,
    missing_bytes: Any,
) -> None:
    """Find the oldest microbatch whose last I a rank has not run, and the bytes that it needs to come there.

    Its F that have not run follow each other, and then a backward: each takes its workspace when the one before has
    given its own back.
    """
    num_microbatches = len(taken_bytes) // num_run.size
    microbatch = num_microbatches
    for index in range(offsets[rank], offsets[rank + 1]):
        microbatch = min(microbatch, num_run[INPUT, stages[index]])
    kept_bytes, most_bytes = 0, 0
    for index in range(offsets[rank], offsets[rank + 1]):
        stage = stages[index]
        if microbatch < num_microbatches and num_run[FORWARD, stage] <= microbatch:
            action = stage * num_microbatches + microbatch
            most_bytes = max(most_bytes, kept_bytes + room_bytes[action])
            kept_bytes += taken_bytes[action] - freed_bytes[action]
    oldest[rank] = microbatch
    missing_bytes[rank] = most_bytes


def _choose_action(
    rank: int,
    free_s: float,
    free_bytes: int,
    oldest: int,
    missing_bytes: int,
    prefers_inputs: bool,
    waits_for_share: float,
    is_deep: bool,
    most_under_way: Any,
    stages: Any,
    num_run: Any,
    ranks: Any,
    seconds: Any,
    sources: Any,
    arrival_s: Any,
    lag_s: Any,
    taken_bytes: Any,
    freed_bytes: Any,
    room_bytes: Any,
) -> tuple[int, float]:
    """Return the action that a rank would run next by the rules of its setting, -1 for none, and when it could start.

    `free_s` and `free_bytes` are when the rank is free, and what it may still take. An F of a microbatch behind the
    `oldest` one leaves the `missing_bytes` free that this one needs to come to its end.
    """
    num_stages, num_microbatches = num_run.shape[1], len(sources) // num_run.size
    chosen = -1
    chosen_s = NEVER_S
    for plane in range(NUM_PLANES):
        # Find the F, I or W that could start first, of several stages.
        first = -1
        first_s = NEVER_S
        is_forward = plane == FORWARD
        for stage in stages:
            microbatch = num_run[plane, stage]
            # A microbatch runs in the order of planes: an I after its F, a W after its I.
            if microbatch == num_microbatches or (not is_forward and num_run[plane - 1, stage] <= microbatch):
                continue
            if is_forward and microbatch - num_run[INPUT, stage] >= most_under_way[stage]:
                continue
            action = (plane * num_stages + stage) * num_microbatches + microbatch
            source = sources[action]
            needed_bytes = taken_bytes[action]
            if is_forward and microbatch > oldest:
                needed_bytes = max(room_bytes[action], needed_bytes - freed_bytes[action] + missing_bytes)
            if needed_bytes > free_bytes or (source >= 0 and arrival_s[source] < 0.0):
                continue
            start_s = free_s
            if source >= 0 and ranks[source] != rank:  # a source on the same rank has ended when the rank is free
                start_s = max(free_s, arrival_s[source] + lag_s[action])
            if start_s < first_s or (start_s == first_s and is_deep):
                first = action
                first_s = start_s
        if first < 0:
            continue
        # Of F and I, the one that is ready first goes first, or that the setting prefers. A W goes before them where it
        # holds them up by a small share of its own seconds: it would end that late.
        is_chosen = chosen < 0 or first_s < chosen_s or (first_s == chosen_s and prefers_inputs)
        if plane == WEIGHT:
            is_chosen = chosen < 0 or free_s + seconds[first] - chosen_s <= waits_for_share * seconds[first]
        if is_chosen:
            chosen = first
            chosen_s = first_s
    return chosen, chosen_s


def _reset(columns: Columns, state: ListState, timing: Timing) -> None:
    """Let nothing have run."""
    timing.arrival_s[:] = NOT_YET_S
    timing.free_s[:] = 0.0
    timing.held_bytes[:] = 0
    timing.link_free_s[:] = 0.0
    state.num_run[:] = 0
    state.is_changed[:] = True
    state.left_s[:] = 0.0
    for action in range(len(columns.rank)):
        state.left_s[columns.rank[action]] += columns.seconds[action]
    for rank in range(len(timing.free_s)):
        _find_oldest(
            rank,
            state.stages,
            state.offsets,
            state.num_run,
            columns.taken_bytes,
            columns.freed_bytes,
            columns.room_bytes,
            state.oldest,
            state.missing_bytes,
        )


def fill_sequence(columns: Columns, state: ListState, timing: Timing, sequence: Any) -> int:
    """Put actions into `sequence` one after another, always the one that can start first; return how many there are.

    Each rank chooses what it would run next by the rules of the setting; of all ranks, the one that starts first runs.
    A return below the number of all actions means that memory leaves no rank anything to run; below 0, that a rank
    cannot end by `state.most_s`. `timing` then has when ranks are free, and when results are there. The number of an
    action is (plane x stages + stage) x microbatches + microbatch; a plane is a kind: forward, input gradient or
    weight gradient.

    Each column is a variable of its own, and helpers get single columns: compiled code counts references to each column
    that it takes from a tuple, and would take seven times as long if it did so for every action.
    """
    ranks, seconds, sources, links, lag_s = columns.rank, columns.seconds, columns.source, columns.link, columns.lag_s
    wire_s, taken_bytes, freed_bytes, limit = columns.wire_s, columns.taken_bytes, columns.freed_bytes, columns.limit
    stages, offsets, neighbours, most_under_way = state.stages, state.offsets, state.neighbours, state.most_under_way
    prefers_inputs, waits_for_share, deep_first = state.prefers_inputs, state.waits_for_share, state.deep_first
    num_run, oldest, missing_bytes, is_changed = state.num_run, state.oldest, state.missing_bytes, state.is_changed
    next_action, next_s, left_s, most_s = state.next_action, state.next_s, state.left_s, state.most_s[0]
    free_s, held_bytes, arrival_s, link_free_s = timing.free_s, timing.held_bytes, timing.arrival_s, timing.link_free_s
    room_bytes, num_microbatches = columns.room_bytes, len(sequence) // num_run.size
    _reset(columns, state, timing)
    for count in range(len(sequence)):
        action, start_s = -1, NEVER_S
        for rank in range(len(free_s)):
            # Choose anew only on ranks for which the last action has changed something.
            if is_changed[rank]:
                is_changed[rank] = False
                next_action[rank], next_s[rank] = _choose_action(
                    rank,
                    free_s[rank],
                    limit[rank] - held_bytes[rank],
                    oldest[rank],
                    missing_bytes[rank],
                    prefers_inputs[rank],
                    waits_for_share[rank],
                    deep_first[rank],
                    most_under_way,
                    stages[offsets[rank] : offsets[rank + 1]],
                    num_run,
                    ranks,
                    seconds,
                    sources,
                    arrival_s,
                    lag_s,
                    taken_bytes,
                    freed_bytes,
                    room_bytes,
                )
            if next_action[rank] >= 0 and next_s[rank] < start_s:
                action, start_s = next_action[rank], next_s[rank]
        if action < 0:
            return count
        # Run the action that starts first: its rank is busy until it ends, and its result leaves when the link is free.
        rank = ranks[action]
        plane, stage = action // num_microbatches // num_run.shape[1], action // num_microbatches % num_run.shape[1]
        sequence[count] = action
        num_run[plane, stage] += 1
        free_s[rank] = ready_s = start_s + seconds[action]
        left_s[rank] -= seconds[action]
        if ready_s + left_s[rank] > most_s:
            return -1
        held_bytes[rank] += taken_bytes[action] - freed_bytes[action]
        link = links[action]
        if link >= 0:
            link_free_s[link] = ready_s = max(link_free_s[link], ready_s) + wire_s[action]
        arrival_s[action] = ready_s
        if plane != WEIGHT:
            _find_oldest(rank, stages, offsets, num_run, taken_bytes, freed_bytes, room_bytes, oldest, missing_bytes)
        # The rank of the stage before or behind may have waited for the result.
        is_changed[rank] = is_changed[neighbours[stage, 0]] = is_changed[neighbours[stage, 1]] = True
    return len(sequence)


DECODER = (fill_sequence, _reset, _choose_action, _find_oldest)
"""The loop of list schedules, and its helpers."""
_LIST = Hot(*DECODER, inlines=True)
