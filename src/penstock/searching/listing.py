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
NEVER_S = 1e300
"""Later than any time."""
NOT_YET_S = -1.0
"""Earlier than any time: the time of what has not run, or cannot run yet."""
FORWARD_PLANE, INPUT_PLANE, WEIGHT_PLANE = range(3)
"""The numbers of the kinds of actions: forward (F), input gradient (I) and weight gradient (W)."""
NUM_PLANES = 3


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


class _State(NamedTuple):
    """A setting and a placement, which the loop reads, and columns that it writes: the state of a list schedule."""

    stages: Any
    """The stages of rank 0, then those of rank 1, and so on."""
    offsets: Any
    """[num_ranks + 1] the index in `stages` at which those of a rank begin."""
    most_under_way: Any
    prefers_inputs: Any
    waits_for_share: Any
    deep_first: Any
    num_microbatches: int
    num_run: Any
    """[3, num_stages] by plane, how many microbatches have run: so the number of the one that runs next."""
    action_of_plane: Any
    """[3] by plane, the action that the rank at hand could run next, -1 for none."""
    ready_s: Any
    """[3] by plane, when this action could start."""
    neighbours: Any
    """[num_stages, 2] the ranks of the stages before and behind each stage, or the stage's own rank at an end."""
    next_action: Any
    """[num_ranks] the action that each rank would run next, -1 for none."""
    next_s: Any
    """[num_ranks] when this action could start."""
    is_changed: Any
    """[num_ranks] whether something has happened on a rank or beside it since its next action was chosen."""


def list_schedule(problem: Problem, setting: Setting) -> Ints | None:
    """Return the sequence of a setting; None where memory leaves no rank anything to do before the end."""
    sequence = np.empty(problem.num_actions, np.int32)
    stages_of_rank = problem.placement.stages_of_rank
    timing = Timing.of(problem)
    timing.arrival_s[:] = NOT_YET_S
    state = _State(
        stages=np.array([stage for stages in stages_of_rank for stage in stages], np.int64),
        offsets=np.cumsum([0, *map(len, stages_of_rank)]).astype(np.int64),
        most_under_way=setting.most_under_way.astype(np.int64),
        prefers_inputs=setting.prefers_inputs,
        waits_for_share=setting.waits_for_share,
        deep_first=setting.deep_first,
        num_microbatches=problem.num_microbatches,
        num_run=np.zeros((NUM_PLANES, problem.num_stages), np.int64),
        action_of_plane=np.zeros(NUM_PLANES, np.int64),
        ready_s=np.zeros(NUM_PLANES),
        neighbours=_neighbours(problem),
        next_action=np.full(problem.num_ranks, -1, np.int64),
        next_s=np.zeros(problem.num_ranks),
        is_changed=np.ones(problem.num_ranks, np.bool_),
    )
    num_actions = _LIST.compiled(Columns.of(problem), state, timing, sequence)
    return sequence if num_actions == problem.num_actions else None


def _neighbours(problem: Problem) -> NDArray[np.int64]:
    placement, stages = problem.placement, np.arange(problem.num_stages)
    neighbours = np.column_stack([placement.previous_stage, placement.next_stage])
    neighbours = np.where(neighbours < 0, stages[:, None], neighbours)
    return np.ascontiguousarray(np.array(placement.rank_of_stage)[neighbours], np.int64)


def _oldest_microbatch(state: _State, rank: int) -> int:
    """Return the oldest microbatch that a rank has not brought to its last I; their number where there is none."""
    oldest = state.num_microbatches
    for index in range(state.offsets[rank], state.offsets[rank + 1]):
        if state.num_run[INPUT_PLANE, state.stages[index]] < oldest:
            oldest = state.num_run[INPUT_PLANE, state.stages[index]]
    return int(oldest)


def _fit_behind(columns: Any, state: _State, rank: int, microbatch: int, held_bytes: int) -> bool:
    """Whether a rank that holds so many bytes can run the F of a microbatch that have yet to run, and a backward.

    They run one after another, so that each takes its workspace when the one before has given its own back.
    """
    for index in range(state.offsets[rank], state.offsets[rank + 1]):
        stage = state.stages[index]
        if microbatch < state.num_microbatches and state.num_run[FORWARD_PLANE, stage] <= microbatch:
            action = stage * state.num_microbatches + microbatch
            if held_bytes + columns.room_bytes[action] > columns.limit[rank]:
                return False
            held_bytes += columns.taken_bytes[action] - columns.freed_bytes[action]
    return True


def _may_forward(columns: Columns, state: _State, timing: Timing, rank: int, stage: int, action: int) -> bool:
    """Whether a forward may run by the numbers under way and by memory, with room left for the oldest microbatch."""
    microbatch = state.num_run[FORWARD_PLANE, stage]
    if microbatch - state.num_run[INPUT_PLANE, stage] >= state.most_under_way[stage]:
        return False
    held_bytes = timing.held_bytes[rank]
    if held_bytes + columns.taken_bytes[action] > columns.limit[rank]:
        return False
    oldest = _oldest_microbatch(state, rank)
    if microbatch <= oldest:
        return True
    if held_bytes + columns.room_bytes[action] > columns.limit[rank]:
        return False
    kept_bytes = columns.taken_bytes[action] - columns.freed_bytes[action]
    return _fit_behind(columns, state, rank, oldest, held_bytes + kept_bytes)


def _ready_s(columns: Columns, state: _State, timing: Timing, plane: int, stage: int, rank: int) -> float:
    """Return when the next action of a stage could start; below 0 where it cannot yet."""
    microbatch = state.num_run[plane, stage]
    # A microbatch runs in the order of planes: an I after its F, a W after its I.
    is_first = plane == FORWARD_PLANE
    if microbatch == state.num_microbatches or (not is_first and state.num_run[plane - 1, stage] <= microbatch):
        return NOT_YET_S
    action = (plane * len(state.stages) + stage) * state.num_microbatches + microbatch
    source = columns.source[action]
    if source >= 0 and timing.arrival_s[source] < 0.0:
        return NOT_YET_S
    if is_first:
        if not _may_forward(columns, state, timing, rank, stage, action):
            return NOT_YET_S
    elif timing.held_bytes[rank] + columns.taken_bytes[action] > columns.limit[rank]:
        return NOT_YET_S
    return earliest_s(columns, timing, action)


def _find_next(columns: Columns, state: _State, timing: Timing, rank: int) -> None:
    """Find the next F, I and W of a rank, of several stages the one that can start first."""
    for plane in range(NUM_PLANES):
        state.action_of_plane[plane] = -1
        state.ready_s[plane] = NEVER_S
        for index in range(state.offsets[rank], state.offsets[rank + 1]):
            stage = state.stages[index]
            start_s, first_s = _ready_s(columns, state, timing, plane, stage, rank), state.ready_s[plane]
            if start_s >= 0.0 and (start_s < first_s or (start_s == first_s and state.deep_first[rank])):
                action = (plane * len(state.stages) + stage) * state.num_microbatches + state.num_run[plane, stage]
                state.action_of_plane[plane] = action
                state.ready_s[plane] = start_s


def _choose_plane(columns: Columns, state: _State, timing: Timing, rank: int) -> int:
    """Return the plane (forward, input gradient or weight gradient) that a rank runs next; -1 for nothing to run.

    By the setting of the rank, one of forward and input gradient goes first where both are ready at the same time. A
    weight gradient runs where nothing else is ready, or where it holds the other up by a small share of its seconds.
    """
    first = INPUT_PLANE if state.prefers_inputs[rank] else FORWARD_PLANE
    second = FORWARD_PLANE if state.prefers_inputs[rank] else INPUT_PLANE
    actions, ready_s = state.action_of_plane, state.ready_s
    plane = first
    if actions[first] < 0 or (actions[second] >= 0 and ready_s[second] < ready_s[first]):
        plane = second
    weight = actions[WEIGHT_PLANE]
    if weight >= 0:
        delay_s = timing.free_s[rank] + columns.seconds[weight] - ready_s[plane]  # by which W would hold it back
        if actions[plane] < 0 or delay_s <= state.waits_for_share[rank] * columns.seconds[weight]:
            plane = WEIGHT_PLANE
    return plane if actions[plane] >= 0 else -1


def _fill_sequence(columns: Columns, state: _State, timing: Timing, sequence: Any) -> int:
    """Put actions into `sequence` one after another, always the one that can start first; return how many there are.

    `state.next_action` [num_ranks] holds what each rank would run next by its rules, -1 for nothing, and `state.next_s`
    when. A return below the number of all actions means that memory leaves no rank anything to run. A plane is a kind:
    forward, input gradient or weight gradient; the number of an action is (plane x stages + stage) x microbatches +
    microbatch.
    """
    plane_size = len(state.stages) * state.num_microbatches
    clear(timing)
    for index in range(len(sequence)):
        action = -1
        start_s = NEVER_S
        for rank in range(len(state.next_action)):
            # Choose anew only on ranks for which the last action has changed something.
            if state.is_changed[rank]:
                state.is_changed[rank] = False
                _find_next(columns, state, timing, rank)
                plane = _choose_plane(columns, state, timing, rank)
                state.next_action[rank] = state.action_of_plane[plane] if plane >= 0 else -1
                state.next_s[rank] = state.ready_s[plane]
            if state.next_action[rank] >= 0 and state.next_s[rank] < start_s:
                action, start_s = state.next_action[rank], state.next_s[rank]
        if action < 0:
            return index
        # Run the action that starts first.
        plane = action // plane_size
        stage = (action - plane * plane_size) // state.num_microbatches
        state.num_run[plane, stage] += 1
        put(columns, timing, action, start_s)
        sequence[index] = action
        state.is_changed[columns.rank[action]] = True
        # The result may be what the rank of the stage before or behind waits for.
        for side in range(state.neighbours.shape[1]):
            state.is_changed[state.neighbours[stage, side]] = True
    return len(sequence)


_HELPERS = (_find_next, _choose_plane, _ready_s, _may_forward, _fit_behind, _oldest_microbatch)
_LIST = Hot(_fill_sequence, *_HELPERS, earliest_s, put, clear)
