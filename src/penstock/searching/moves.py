"""Local search: moves single actions to other places in their rank's order, and keeps what is not worse for long.

An action can go as far as behind what it waits for, and in front of what waits for it: so every sequence that is tried
can run. Half of the moves take an action of the critical path, along which the makespan is made. A worse sequence is
accepted if it is worse by less than a random share of a temperature, which falls; the best one that fits is kept.
"""

from typing import Any, NamedTuple

import numpy as np

from penstock.ir.hot import Hot
from penstock.searching.problem import Ints, Problem
from penstock.searching.sequences import TIMERS, Columns, Timing, run, time_sequence

NUM_SUCCESSORS = 2
MOVES_PER_PATH = 32
"""Accepted moves after which the critical path is looked for again, though the cost has not changed."""
MEAN_END_WEIGHT = 1e-3
"""The weight of the mean end of all ranks, beside the objective."""
CHANCE_STEPS = 1_000_000
"""How many different chances the random number has by which a worse sequence is accepted."""
LONGEST_MOVE = 12
"""The most actions of its rank that one move takes an action past."""


class State(NamedTuple):
    """The sequence, and all that moves change with it."""

    sequence: Any
    """[num_actions] the sequence that the next move changes."""
    index_of: Any
    """[num_actions] by action, its index in the sequence."""
    path: Any
    """[num_actions] the actions of a critical path, of which `_find_path` returns the number."""
    random: Any
    """[1] the state of the generator of random numbers."""
    best: Any
    """[num_actions] the best sequence that fits."""
    best_s: Any
    """[1] the objective of the best sequence."""


class Moves:
    """Moves the actions of sequences of one problem."""

    def __init__(self, problem: Problem, seed: int, *, by_span: bool = False) -> None:
        self._problem = problem
        self._columns = Columns.of(problem)
        self._random = np.array([seed * 7919 + 12345], np.int64)
        self._by_span = by_span
        self._successors = _successors(problem)

    def improve(self, sequence: Ints, best: Ints, best_s: float, num_moves: int, temperature_s: float) -> State:
        """Try `num_moves` random moves of a sequence that fits; return the last sequence and the best one.

        `best` is the best sequence so far, and `best_s` its objective in seconds. The higher `temperature_s` is, the
        more seconds a move may lose.
        """
        timed = run(self._problem, sequence)
        # In the order of starts, an action is free to go wherever nothing of another rank would have to move with it.
        by_start = np.lexsort((timed.end_s[sequence], timed.start_s[sequence]))
        state = State(
            sequence=sequence[by_start].astype(np.int32),
            index_of=np.empty(len(sequence), np.int64),
            path=np.zeros(len(sequence), np.int32),
            random=self._random,
            best=best.copy(),
            best_s=np.array([best_s]),
        )
        options = self._by_span, num_moves, float(temperature_s)
        _MOVE.compiled(self._columns, self._successors, *options, state, Timing.of(self._problem))
        return state


def _successors(problem: Problem) -> Ints:
    """Return the actions that wait for each action, [num_actions, 2], -1 for none."""
    successors = np.full((problem.num_actions, NUM_SUCCESSORS), -1, np.int32)
    for sources in (problem.source, problem.activation_source):
        for action in np.flatnonzero(sources >= 0).tolist():
            of_source = successors[sources[action]]
            of_source[int(of_source[0] >= 0)] = action
    return successors


def draw(state: Any, below: int) -> int:
    """Return a number from 0, below another one, from the upper bits of a linear congruential generator of 31 bits."""
    state[0] = (state[0] * 1103515245 + 12345) & 0x7FFFFFFF
    high = state[0] >> 8
    state[0] = (state[0] * 1103515245 + 12345) & 0x7FFFFFFF
    return int(((high << 20) ^ (state[0] >> 8)) % below)


def _shift(sequence: Any, index_of_action: Any, begin: int, end: int) -> None:
    """Move the action at one index to another; those between them make room."""
    action = sequence[begin]
    step = 1 if end > begin else -1
    index = begin
    while index != end:
        sequence[index] = sequence[index + step]
        index_of_action[sequence[index]] = index
        index += step
    sequence[end] = action
    index_of_action[action] = end


def _previous_on_rank(columns: Columns, state: State, action: int) -> int:
    """Return the action that its rank runs before it, -1 for none."""
    index = state.index_of[action] - 1
    while index >= 0 and columns.rank[state.sequence[index]] != columns.rank[action]:
        index -= 1
    return int(state.sequence[index]) if index >= 0 else -1


def _find_path(columns: Any, state: State, timing: Timing, by_span: bool) -> int:
    """Write the actions of a critical path into `state.path`, the last one first; return how many there are.

    A critical path ends with the action that ends last (if `by_span`, last after the first start of its rank). Each of
    its actions starts when the one before it ends, so the path decides how long the sequence takes.
    """
    action = state.sequence[0]
    longest_s = -1.0
    for index in range(len(state.sequence)):
        last = state.sequence[index]
        length_s = timing.end_s[last] - timing.first_s[columns.rank[last]] if by_span else timing.end_s[last]
        if length_s > longest_s:
            action, longest_s = last, length_s
    count = 0
    while action >= 0 and count < len(state.path):
        state.path[count] = action
        count += 1
        # It waited for one of two: the action before it on its rank if that ended right then, else its source.
        previous = _previous_on_rank(columns, state, action)
        is_critical = previous >= 0 and timing.end_s[previous] >= timing.start_s[action]
        action = previous if is_critical else columns.source[action]
    return count


def _draw_target(columns: Columns, successors: Any, state: State, action: int) -> int:
    """Draw the index to which an action goes: past some of its rank's actions, between its sources and successors."""
    num_to_pass = 1 + draw(state.random, LONGEST_MOVE)
    is_earlier = draw(state.random, 2) == 0
    # Find the index that the action may not reach: that of its last source, or of its first successor.
    end = -1 if is_earlier else len(state.sequence)
    if is_earlier:
        if columns.source[action] >= 0:
            end = state.index_of[columns.source[action]]
        if columns.activation_source[action] >= 0 and state.index_of[columns.activation_source[action]] > end:
            end = state.index_of[columns.activation_source[action]]
    else:
        for column in range(successors.shape[1]):
            successor = successors[action, column]
            if successor >= 0 and state.index_of[successor] < end:
                end = state.index_of[successor]
    # Go on until the action has passed `num_to_pass` actions of its own rank; those of other ranks do not count.
    step = -1 if is_earlier else 1
    target = state.index_of[action]
    index = target + step
    while index != end and num_to_pass > 0:
        if columns.rank[state.sequence[index]] == columns.rank[action]:
            target = index
            num_to_pass -= 1
        index += step
    return int(target)


def _cost_s(timing: Timing, by_span: bool) -> float:
    """Return what moves make smaller: the objective, plus a thousandth of the mean time of all ranks.

    The objective is the makespan or, if `by_span`, the longest span of a rank. Most moves do not change it; the mean
    tells such sequences apart.
    """
    total_s = 0.0
    for rank in range(len(timing.free_s)):
        total_s += timing.free_s[rank] - timing.first_s[rank] if by_span else timing.free_s[rank]
    objective_s = timing.span_s[0] if by_span else timing.makespan_s[0]
    return float(objective_s + MEAN_END_WEIGHT * total_s / len(timing.free_s))


def _is_accepted(columns: Any, state: State, timing: Timing, more_s: float, temperature_s: float) -> bool:
    """Whether a sequence that costs `more_s` seconds more than the one before the move takes its place.

    A sequence that breaks a memory limit never does. One that costs more does if the loss is below a random share of
    `temperature_s`.
    """
    for rank in range(len(columns.limit)):
        if timing.peak_bytes[rank] > columns.limit[rank]:
            return False
    return more_s <= 0.0 or more_s < temperature_s * draw(state.random, CHANCE_STEPS) / CHANCE_STEPS


def _note_best(state: State, objective_s: float) -> None:
    if objective_s < state.best_s[0]:
        state.best_s[0] = objective_s
        for index in range(len(state.sequence)):
            state.best[index] = state.sequence[index]


def _try_moves(
    columns: Columns, successors: Any, by_span: bool, num_moves: int, temperature_s: float, state: State, timing: Timing
) -> None:
    """Try `num_moves` random moves of an action to another place of `state.sequence`; write the best into `state.best`.

    A sequence has all actions of all ranks in an order in which they can run. The objective is its makespan, from the
    first start to the last end, or, if `by_span`, the longest span of a rank, from its first start to its last end. A
    move keeps each action behind what it waits for, and before its `successors` [num_actions, 2], the at most two
    actions that wait for it (-1 for none). A move that costs more is kept with a chance that falls with the seconds
    lost and grows with `temperature_s`; one that breaks the memory limit is undone.
    """
    num_actions = len(state.sequence)
    # Time the first sequence: moves are judged by the change of its cost, the objective and a little of the mean time.
    num_accepted = 0
    for index in range(num_actions):
        state.index_of[state.sequence[index]] = index
    time_sequence(state.sequence, columns, timing)
    cost_s = _cost_s(timing, by_span)
    num_critical = _find_path(columns, state, timing, by_span)
    for _number in range(num_moves):
        is_critical = draw(state.random, 2) == 0  # half of the moves take an action of the critical path
        action = state.path[draw(state.random, num_critical)] if is_critical else draw(state.random, num_actions)
        begin = state.index_of[action]
        target = _draw_target(columns, successors, state, action)
        if target == begin:
            continue
        # Move the action, time the sequence, and move it back if the sequence breaks the limit or costs too much.
        _shift(state.sequence, state.index_of, begin, target)
        time_sequence(state.sequence, columns, timing)
        new_cost_s = _cost_s(timing, by_span)
        if not _is_accepted(columns, state, timing, new_cost_s - cost_s, temperature_s):
            _shift(state.sequence, state.index_of, target, begin)
            continue
        num_accepted += 1
        # The critical path (actions that decide how long the step takes) is found anew when the time has changed.
        if new_cost_s != cost_s or num_accepted % MOVES_PER_PATH == 0:
            num_critical = _find_path(columns, state, timing, by_span)
        cost_s = new_cost_s
        # The best one is the best by the objective alone.
        _note_best(state, timing.span_s[0] if by_span else timing.makespan_s[0])


_HELPERS = (_find_path, _previous_on_rank, _draw_target, _cost_s, _is_accepted, _note_best, _shift, draw)
_MOVE = Hot(_try_moves, *_HELPERS, *TIMERS)
