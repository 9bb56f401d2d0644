"""`Model`: a problem in ticks as constraints of OR-tools' CP-SAT.

    rank 0   [0F0][0F1]           [0I0][0W0]      actions of a rank do not overlap
    0 -> 1        [m0] [m1]                       nor do messages of a serialized link; they leave as they are made
    rank 1              [1F0][1I0][1W0]           an action starts behind its source, its lag and what it saved

Memory: of two actions of a rank, a literal says which runs first, unless waits say so. So what a rank holds when an
action starts is a sum of literals. CP-SAT's own reservoirs and cumulatives prove less in the same time.

Microbatches that are alike run in the order of their numbers on each stage. That loses nothing: in any order, let the
k-th to run of each kind and stage be the k-th microbatch. By then as many have left the stage before, and each rank
holds as much as it did.
"""

import heapq
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.deps import NONE
from penstock.searching.problem import FORWARD, WEIGHT, Ints, Problem
from penstock.searching.sequences import run

Bools = NDArray[np.bool_]
STEPS = 4
"""Of a mean F, in which a rank may begin later than it could. Finer ones prove little more, in far more time."""


class Model:
    """The constraints, and what leads from them to a sequence."""

    def __init__(
        self, problem: Problem, horizon: int, *, by_span: bool, is_prompt: bool = False, lost: int = 0
    ) -> None:
        """Add all constraints of times up to a horizon.

        `is_prompt`: in a span, ranks begin as soon as they can. `lost`: ticks by which a time may be below its seconds.
        """
        from ortools.sat.python import cp_model

        self.problem = problem
        self.constraints: Any = cp_model.CpModel()
        self._horizon = horizon
        self._seconds = problem.seconds.astype(np.int64).tolist()
        self._objective = self.constraints.new_int_var(0, horizon, "objective")
        new = self.constraints.new_int_var
        self._starts = [new(0, max(horizon - seconds, 0), "") for seconds in self._seconds]
        self._ends = [start + seconds for start, seconds in zip(self._starts, self._seconds, strict=True)]
        self._leaves = {int(each): new(0, horizon, "") for each in np.flatnonzero(problem.link >= 0)}
        self._groups = groups_alike(problem)
        self._before = waits_of(problem, self._groups)
        self._known = reached(self._before)
        self.literals: dict[tuple[int, int], Any] = {}
        self._add_ranks_and_links()
        self._add_waits()
        for rank in range(problem.num_ranks):
            self._add_memory(rank)
        self._add_implications()
        self._add_objective(self._add_begins(is_prompt, lost) if by_span else [0] * problem.num_ranks)

    # ---- time

    def _add_ranks_and_links(self) -> None:
        interval, add_no_overlap = self.constraints.new_fixed_size_interval_var, self.constraints.add_no_overlap
        problem = self.problem
        for rank in range(problem.num_ranks):
            own = np.flatnonzero(problem.rank == rank).tolist()
            add_no_overlap([interval(self._starts[each], self._seconds[each], "") for each in own])
        wire = problem.wire_s.astype(np.int64)
        for link in np.unique(problem.link[problem.link >= 0]):
            own = np.flatnonzero(problem.link == link).tolist()
            add_no_overlap([interval(self._leaves[each], int(wire[each]), "") for each in own])
            for place, one in enumerate(own):
                self.constraints.add(self._leaves[one] >= self._ends[one])
                for other in own[:place]:
                    self._add_in_turn(one, other, int(wire[one]), int(wire[other]))

    def _add_in_turn(self, one: int, other: int, wire: int, wire_of_other: int) -> None:
        """Let two messages of a link leave as they are made."""
        is_first = self._is_first(one, other)
        if is_first is not False:
            _add_if(self.constraints, is_first, self._leaves[other] >= self._leaves[one] + wire)
        if is_first is not True:
            is_second = self._is_first(other, one)
            _add_if(self.constraints, is_second, self._leaves[one] >= self._leaves[other] + wire_of_other)

    def _add_waits(self) -> None:
        for one, other in np.argwhere(self._before).tolist():
            self.constraints.add(self._starts[other] >= self._ready(one, other))

    def _ready(self, one: int, other: int) -> Any:
        """Return when an action has come to another one that waits for it."""
        problem = self.problem
        if problem.rank[one] == problem.rank[other]:
            return self._ends[one]
        left = self._leaves[one] + int(problem.wire_s[one]) if one in self._leaves else self._ends[one]
        return left + int(problem.lag_s[other])

    # ---- memory

    def _is_first(self, one: int, other: int) -> Any:
        """Return whether an action of a rank runs before another one: True, False or a literal."""
        if self._known[one, other] or self._known[other, one]:
            return bool(self._known[one, other])
        if (one, other) not in self.literals:
            literal = self.constraints.new_bool_var("")
            self.literals[one, other], self.literals[other, one] = literal, ~literal
            _add_if(self.constraints, literal, self._starts[other] >= self._ends[one])
            _add_if(self.constraints, ~literal, self._starts[one] >= self._ends[other])
        return self.literals[one, other]

    def _add_memory(self, rank: int) -> None:
        """Limit what a rank holds at each start of what takes, and behind each end of what frees less than nothing."""
        own = np.flatnonzero(self.problem.rank == rank)
        taken, freed = self.problem.taken_bytes[own], self.problem.freed_bytes[own]
        largest = taken + np.maximum(-freed, 0)
        if largest.sum() <= self.problem.limit[rank]:
            return
        unit = math.gcd(*taken.tolist(), *freed.tolist())
        limit, change = int(self.problem.limit[rank]) // unit, (taken - freed) // unit
        for place in np.flatnonzero(largest).tolist():
            held = int(largest[place]) // unit
            for other in np.flatnonzero(change).tolist():
                if other != place:
                    held = held + int(change[other]) * self._is_first(int(own[other]), int(own[place]))
            self.constraints.add(held <= limit)

    def _add_implications(self) -> None:
        """Let what comes before an action come before all that comes behind it: times alone show this late."""
        rank = self.problem.rank
        own = [np.flatnonzero(column & (rank == rank[each])).tolist() for each, column in enumerate(self._before.T)]
        for (one, other), literal in self.literals.items():
            for before in own[one]:
                if (before, other) in self.literals:
                    self.constraints.add_implication(literal, self.literals[before, other])

    # ---- objective

    def _add_objective(self, begins: list[Any]) -> None:
        """Count to the last end of each rank, from its begin."""
        problem = self.problem
        weight = problem.plane(np.arange(problem.num_actions), WEIGHT)
        for rank, stages in enumerate(problem.placement.stages_of_rank):
            for action in (int(weight[stage, group[-1]]) for stage in stages for group in self._groups):
                self.constraints.add(self._objective >= self._ends[action] - begins[rank])
            self.constraints.add(self._objective >= int(problem.seconds[problem.rank == rank].sum()))
        self.constraints.minimize(self._objective)

    def _add_begins(self, is_prompt: bool, lost: int) -> list[Any]:
        """Return what counts as the begin of each rank, from which its span is: never less than its first start.

        [1] All begin with one microbatch, each as soon as it has come to them. The rank of stage 0 begins at 0.
        [2] A rank may also begin with another microbatch, which comes at least an F later. This may pay: the rank then
            waits less. When this is depends on all that ran before, so any later time is allowed, in steps: a proof
            tick by tick would not end.
        """
        problem, add = self.problem, self.constraints.add
        forward = problem.plane(np.arange(problem.num_actions), FORWARD)
        ways, seconds = _ways(problem), problem.plane(problem.seconds, FORWARD).astype(np.int64)
        come, least = np.cumsum(ways, axis=0), np.cumsum(ways.min(axis=1))
        step = max(int(seconds.mean()) // STEPS, 1)
        latest = self._horizon + step + lost
        heads = [group[0] for group in self._groups]
        chosen = [self.constraints.new_bool_var("") for _ in heads]
        self.constraints.add_exactly_one(chosen)
        begins: list[Any] = []
        for first in (stages[0] for stages in problem.placement.stages_of_rank):
            starts = [self._starts[forward[first, head]] for head in heads]
            begin = self.constraints.new_int_var(0, latest, "")
            is_first = self.constraints.new_bool_var("")  # the microbatch with which all begin
            for literal, head, start in zip(chosen, heads, starts, strict=True):
                add(begin <= start).only_enforce_if(is_first)  # [1]
                add(start == int(come[first, head])).only_enforce_if(literal, is_first)
                add(begin == int(come[first, head])).only_enforce_if(literal, is_first)
            begins.append(begin)
            if is_prompt or first == 0:
                add(is_first == 1)
                continue
            steps = self.constraints.new_int_var(0, latest // step, "")
            add(begin == int(least[first]) + step * steps).only_enforce_if(~is_first)  # [2]
            earliest = int(least[first]) + int(seconds[:first].min())
            for start in starts:
                add(start >= earliest).only_enforce_if(~is_first)
                add(start >= begin - step + 1 - lost).only_enforce_if(~is_first)
        return begins

    def at_most(self, objective: int) -> None:
        """Ask for nothing worse."""
        self.constraints.add(self._objective <= objective)

    # ---- sequences

    def hint(self, sequence: Ints) -> None:
        """Let the solver begin with a sequence."""
        timed = run(self.problem, sequence)
        start_s, arrival_s = (
            _in_turn(self.problem, self._groups, column) for column in (timed.start_s, timed.arrival_s)
        )
        leaves = (arrival_s - self.problem.wire_s).astype(np.int64)
        start, end = start_s.astype(np.int64), (start_s + self.problem.seconds).astype(np.int64)
        add_hint = self.constraints.add_hint
        for action, variable in enumerate(self._starts):
            add_hint(variable, int(start[action]))
        for action, variable in self._leaves.items():
            add_hint(variable, int(leaves[action]))
        for number, ((one, other), literal) in enumerate(self.literals.items()):
            if number % 2 == 0:  # the other ones are their opposites
                add_hint(literal, bool(end[one] <= start[other]))

    def sequence(self, solver: Any) -> Ints:
        """Return what a solver has found."""
        return self.sequence_at([solver.value(start) for start in self._starts])

    def sequence_at(self, starts: list[int]) -> Ints:
        """Return all actions in the order of their starts, each behind what it waits for.

        Of those that start together, what takes no time comes first, then what frees memory.
        """
        ends = [start + seconds for start, seconds in zip(starts, self._seconds, strict=True)]
        keys = [(start, end, -number) for number, (start, end) in enumerate(zip(starts, ends, strict=True))]
        missing, found = self._before.sum(axis=0), []
        ready = [keys[each] for each in np.flatnonzero(missing == 0)]
        heapq.heapify(ready)
        while ready:
            action = -heapq.heappop(ready)[2]
            found.append(action)
            behind = np.flatnonzero(self._before[action])
            missing[behind] -= 1
            for each in behind[missing[behind] == 0]:
                heapq.heappush(ready, keys[each])
        return np.array(found, np.int32)


def _add_if(constraints: Any, literal: Any, claim: Any) -> None:
    added = constraints.add(claim)
    if literal is not True:
        added.only_enforce_if(literal)


def _in_turn(problem: Problem, groups: list[list[int]], column: NDArray[np.float64]) -> NDArray[np.float64]:
    """Let microbatches that are alike come in the order of their numbers."""
    found = column.reshape(-1, problem.num_microbatches).copy()
    for group in groups:
        found[:, group] = np.sort(found[:, group], axis=1)
    return found.reshape(-1)


def _ways(problem: Problem) -> NDArray[np.int64]:
    """[num_stages, num_microbatches] from when a first microbatch comes to one stage to when it comes to the next."""
    firsts = [stages[0] for stages in problem.placement.stages_of_rank]
    assert all(first == 0 or first - 1 in firsts for first in firsts), "a rank begins behind the begin of another"
    seconds, wire, lag = (problem.plane(each, FORWARD) for each in (problem.seconds, problem.wire_s, problem.lag_s))
    ways = lag.copy()
    ways[1:] += (seconds + wire)[:-1]
    return ways.astype(np.int64)


def groups_alike(problem: Problem) -> list[list[int]]:
    """Return the microbatches that take the same on every stage, each group in the order of their numbers."""
    columns = (problem.seconds, problem.lag_s, problem.wire_s, problem.taken_bytes, problem.freed_bytes)
    table = np.concatenate([column.reshape(-1, problem.num_microbatches) for column in columns])
    groups: dict[bytes, list[int]] = {}
    for microbatch in range(problem.num_microbatches):
        groups.setdefault(table[:, microbatch].tobytes(), []).append(microbatch)
    return list(groups.values())


def waits_of(problem: Problem, groups: list[list[int]]) -> Bools:
    """[num_actions, num_actions] whether the second one waits for the first, or comes behind it as one alike."""
    found = np.zeros((problem.num_actions, problem.num_actions), np.bool_)
    for column in (problem.source, problem.activation_source):
        has = np.flatnonzero(column != NONE)
        found[column[has], has] = True
    numbers = np.arange(problem.num_actions).reshape(-1, problem.num_microbatches)
    for group in groups:
        found[numbers[:, group[:-1]], numbers[:, group[1:]]] = True
    return found


def reached(before: Bools) -> Bools:
    """[num_actions, num_actions] whether the second one comes behind the first, in any number of steps."""
    found = before
    while True:
        further = found | (found.astype(np.float32) @ found.astype(np.float32) > 0)
        if (further == found).all():
            return found
        found = further
