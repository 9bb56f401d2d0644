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
LOOKS_AGAIN = 32
"""Sequences of equal makespan that are taken until the critical path is looked for again."""
SHARE_OF_ALL = 1e-3
"""Of the mean of all ranks, beside the longest."""
LONGEST_MOVE = 12
"""Of its rank's actions that an action passes at most."""


class State(NamedTuple):
    """The sequence, and all that moves change with it."""

    sequence: Any
    """From which the next moves go on."""
    place: Any
    """By action, where it is in the sequence."""
    path: Any
    """The actions of a critical path."""
    random: Any
    """[1]"""
    best: Any
    best_s: Any
    """[1] the objective of the best one."""


class Moves:
    """Moves actions of a problem."""

    def __init__(self, problem: Problem, seed: int, *, by_span: bool = False) -> None:
        self._problem = problem
        self._columns = Columns.of(problem)
        self._random = np.array([seed * 7919 + 12345], np.int64)
        self._by_span = by_span
        self._successors = _successors(problem)

    def improve(self, sequence: Ints, best: Ints, best_s: float, num_moves: int, temperature_s: float) -> State:
        """Try so many moves of a sequence that fits."""
        problem = self._problem
        found = run(problem, sequence)
        # In the order of starts, an action is free to go wherever nothing of another rank would have to move with it.
        place = np.empty(len(sequence), np.int64)
        place[sequence] = np.arange(len(sequence))
        own = sequence[np.lexsort((place[sequence], found.end_s[sequence], found.start_s[sequence]))].astype(np.int32)
        path = np.zeros(problem.num_actions, np.int32)
        state = State(own, place, path, self._random, best.copy(), np.array([best_s]))
        options = self._by_span, num_moves, float(temperature_s)
        _MOVE.compiled(self._columns, self._successors, *options, state, Timing.of(problem))
        return state


def _successors(problem: Problem) -> Ints:
    """[num_actions, 2] the actions that wait for each one, -1 for none."""
    found = np.full((problem.num_actions, NUM_SUCCESSORS), -1, np.int32)
    for column in (problem.source, problem.saved):
        for action in np.flatnonzero(column >= 0).tolist():
            before = column[action]
            place = int(found[before, 0] >= 0)
            found[before, place] = action
    return found


def _draw(state: Any, below: int) -> int:
    """Return a number from 0, below another one (a linear congruential generator of 31 bits, its upper ones)."""
    state[0] = (state[0] * 1103515245 + 12345) & 0x7FFFFFFF
    high = state[0] >> 8
    state[0] = (state[0] * 1103515245 + 12345) & 0x7FFFFFFF
    return int(((high << 20) ^ (state[0] >> 8)) % below)


def _shift(sequence: Any, place: Any, begin: int, end: int) -> None:
    """Move the action at one index to another; those between them make room."""
    action = sequence[begin]
    step = 1 if end > begin else -1
    index = begin
    while index != end:
        sequence[index] = sequence[index + step]
        place[sequence[index]] = index
        index += step
    sequence[end] = action
    place[action] = end


def _before_on_rank(of: Any, state: Any, action: int) -> int:
    """Return the action that its rank runs before it, -1 for none."""
    index = state.place[action] - 1
    while index >= 0 and of.rank[state.sequence[index]] != of.rank[action]:
        index -= 1
    return int(state.sequence[index]) if index >= 0 else -1


def _find_path(of: Any, state: Any, timing: Any, by_span: bool) -> int:
    """Find the actions of a critical path, the last one first; return how many there are."""
    action = state.sequence[0]
    longest_s = -1.0
    for index in range(len(state.sequence)):
        other = state.sequence[index]
        length_s = timing.end_s[other] - timing.first_s[of.rank[other]] if by_span else timing.end_s[other]
        if length_s > longest_s:
            action, longest_s = other, length_s
    count = 0
    while action >= 0 and count < len(state.path):
        state.path[count] = action
        count += 1
        # It waited for one of two: the action before it on its rank if that ended right then, else its source.
        before = _before_on_rank(of, state, action)
        waited = before >= 0 and timing.end_s[before] >= timing.start_s[action]
        action = before if waited else of.source[action]
    return count


def _target(of: Any, successors: Any, state: Any, action: int) -> int:
    """Draw the place to which an action goes: past some of its rank's actions, as far as what waits allows."""
    passed = 1 + _draw(state.random, LONGEST_MOVE)
    is_earlier = _draw(state.random, 2) == 0
    end = -1 if is_earlier else len(state.sequence)
    if is_earlier:
        if of.source[action] >= 0:
            end = state.place[of.source[action]]
        if of.saved[action] >= 0 and state.place[of.saved[action]] > end:
            end = state.place[of.saved[action]]
    else:
        for column in range(successors.shape[1]):
            after = successors[action, column]
            if after >= 0 and state.place[after] < end:
                end = state.place[after]
    step = -1 if is_earlier else 1
    target = state.place[action]
    index = target + step
    while index != end and passed > 0:
        if of.rank[state.sequence[index]] == of.rank[action]:
            target = index
            passed -= 1
        index += step
    return int(target)


def _cost_s(timing: Any, by_span: bool) -> float:
    """Return the objective, and a little of what all ranks take, which tells apart sequences of one objective."""
    total_s = 0.0
    for own in range(len(timing.free_s)):
        total_s += timing.free_s[own] - timing.first_s[own] if by_span else timing.free_s[own]
    objective_s = timing.span_s[0] if by_span else timing.makespan_s[0]
    return float(objective_s + SHARE_OF_ALL * total_s / len(timing.free_s))


def _is_taken(of: Any, state: Any, timing: Any, more_s: float, temperature_s: float) -> bool:
    """Whether a sequence is accepted that takes so much more time."""
    for own in range(len(of.limit)):
        if timing.peak[own] > of.limit[own]:
            return False
    return more_s <= 0.0 or more_s < temperature_s * _draw(state.random, 1000000) / 1000000.0


def _note_best(state: Any, objective_s: float) -> None:
    if objective_s < state.best_s[0]:
        state.best_s[0] = objective_s
        for index in range(len(state.sequence)):
            state.best[index] = state.sequence[index]


def _move(
    of: Any, successors: Any, by_span: bool, num_moves: int, temperature_s: float, state: Any, timing: Any
) -> None:
    num_actions = len(state.sequence)
    num_taken = 0
    for index in range(num_actions):
        state.place[state.sequence[index]] = index
    time_sequence(state.sequence, of, timing)
    now_s = _cost_s(timing, by_span)
    num_critical = _find_path(of, state, timing, by_span)
    for _number in range(num_moves):
        is_critical = _draw(state.random, 2) == 0
        action = state.path[_draw(state.random, num_critical)] if is_critical else _draw(state.random, num_actions)
        begin = state.place[action]
        target = _target(of, successors, state, action)
        if target == begin:
            continue
        _shift(state.sequence, state.place, begin, target)
        time_sequence(state.sequence, of, timing)
        found_s = _cost_s(timing, by_span)
        if not _is_taken(of, state, timing, found_s - now_s, temperature_s):
            _shift(state.sequence, state.place, target, begin)
            continue
        num_taken += 1
        if found_s != now_s or num_taken % LOOKS_AGAIN == 0:
            num_critical = _find_path(of, state, timing, by_span)
        now_s = found_s
        _note_best(state, timing.span_s[0] if by_span else timing.makespan_s[0])


_HELPERS = (_find_path, _before_on_rank, _target, _cost_s, _is_taken, _note_best, _shift, _draw)
_MOVE = Hot(_move, *_HELPERS, *TIMERS)
