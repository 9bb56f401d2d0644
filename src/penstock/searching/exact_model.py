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
"""The steps of a mean F in which a rank may begin later than it could; finer ones prove little more, and take long."""


class Model:
    """The constraints, and what leads from them to a sequence."""

    def __init__(
        self, problem: Problem, horizon: int, *, by_span: bool, is_prompt: bool = False, lost: int = 0
    ) -> None:
        """Write a problem as constraints of OR-tools' CP-SAT, of which a solver finds the least objective.

        Times are whole ticks, from 0 to `horizon`; a tick's rounding may have cut up to `lost` ticks off a time. The
        objective is the makespan or, if `by_span`, the longest time from a rank's begin to its last end. With
        `is_prompt`, ranks begin as soon as they can.
        """
        from ortools.sat.python import cp_model

        self.problem = problem
        self.constraints: Any = cp_model.CpModel()
        self._horizon = horizon
        self._seconds = problem.seconds.astype(np.int64).tolist()
        self._objective = self.constraints.new_int_var(0, horizon, "objective")
        new = self.constraints.new_int_var
        # Variables: when each action starts, and when its message leaves on a link that carries one at a time.
        self._starts = [new(0, max(horizon - seconds, 0), "") for seconds in self._seconds]
        self._end_times = [start + seconds for start, seconds in zip(self._starts, self._seconds, strict=True)]
        self._leaves = {int(action): new(0, horizon, "") for action in np.flatnonzero(problem.link >= 0)}
        # Microbatches that are alike run in the order of their numbers, which `waits_of` adds to what actions wait for.
        # Between further pairs of actions of a rank, a literal (a boolean variable) says which runs first.
        self._groups = groups_alike(problem)
        self._waits = waits_of(problem, self._groups)
        self._precedes = transitive_closure(self._waits)
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
            actions = np.flatnonzero(problem.rank == rank).tolist()
            add_no_overlap([interval(self._starts[action], self._seconds[action], "") for action in actions])
        wire = problem.wire_s.astype(np.int64)
        for link in np.unique(problem.link[problem.link >= 0]):
            senders = np.flatnonzero(problem.link == link).tolist()
            add_no_overlap([interval(self._leaves[sender], int(wire[sender]), "") for sender in senders])
            for index, sender in enumerate(senders):
                self.constraints.add(self._leaves[sender] >= self._end_times[sender])
                for earlier_sender in senders[:index]:
                    self._add_in_turn(sender, earlier_sender)

    def _add_in_turn(self, first: int, second: int) -> None:
        """Let the messages of two actions on a link leave as they are made."""
        for sender, next_sender in ((first, second), (second, first)):
            is_first = self._is_first(sender, next_sender)
            if is_first is not False:
                free_time = self._leaves[sender] + int(self.problem.wire_s[sender])
                _add_if(self.constraints, is_first, self._leaves[next_sender] >= free_time)

    def _add_waits(self) -> None:
        for source, action in np.argwhere(self._waits).tolist():
            self.constraints.add(self._starts[action] >= self._ready(source, action))

    def _ready(self, source: int, action: int) -> Any:
        """Return when the result of a source has come to an action that waits for it."""
        problem = self.problem
        if problem.rank[source] == problem.rank[action]:
            return self._end_times[source]
        on_link = source in self._leaves
        arrival = self._leaves[source] + int(problem.wire_s[source]) if on_link else self._end_times[source]
        return arrival + int(problem.lag_s[action])

    # ---- memory

    def _is_first(self, first: int, second: int) -> Any:
        """Return whether the first of two actions of a rank runs before the second: True, False or a literal."""
        if self._precedes[first, second] or self._precedes[second, first]:
            return bool(self._precedes[first, second])
        if (first, second) not in self.literals:
            literal = self.constraints.new_bool_var("")
            self.literals[first, second], self.literals[second, first] = literal, ~literal
            _add_if(self.constraints, literal, self._starts[second] >= self._end_times[first])
            _add_if(self.constraints, ~literal, self._starts[first] >= self._end_times[second])
        return self.literals[first, second]

    def _add_memory(self, rank: int) -> None:
        """Limit what a rank holds at each start that takes bytes, and after each end that frees less than nothing.

        Bytes are counted in their largest common unit.
        """
        actions = np.flatnonzero(self.problem.rank == rank)
        taken_bytes, freed_bytes = self.problem.taken_bytes[actions], self.problem.freed_bytes[actions]
        largest = taken_bytes + np.maximum(-freed_bytes, 0)
        if largest.sum() <= self.problem.limit[rank]:
            return
        unit = math.gcd(*taken_bytes.tolist(), *freed_bytes.tolist())
        limit, changes = int(self.problem.limit[rank]) // unit, (taken_bytes - freed_bytes) // unit
        for action, action_bytes in zip(actions[largest != 0].tolist(), largest[largest != 0].tolist(), strict=True):
            level = action_bytes // unit
            for earlier, change in zip(actions.tolist(), changes.tolist(), strict=True):
                if earlier != action and change:
                    level = level + change * self._is_first(earlier, action)
            self.constraints.add(level <= limit)

    def _add_implications(self) -> None:
        """Let what an action waits for on its rank precede all that the action precedes: times alone show this late."""
        rank = self.problem.rank
        waits_on_rank = self._waits & (rank[:, None] == rank)
        sources = [np.flatnonzero(column).tolist() for column in waits_on_rank.T]
        for (first, second), literal in self.literals.items():
            for source in sources[first]:
                if (source, second) in self.literals:
                    self.constraints.add_implication(literal, self.literals[source, second])

    # ---- objective

    def _add_objective(self, begins: list[Any]) -> None:
        """Minimize the largest of all ranks' times from their begins to their last ends."""
        problem = self.problem
        weight = problem.plane(np.arange(problem.num_actions), WEIGHT)
        for rank, stages in enumerate(problem.placement.stages_of_rank):
            for action in (int(weight[stage, group[-1]]) for stage in stages for group in self._groups):
                self.constraints.add(self._objective >= self._end_times[action] - begins[rank])
            self.constraints.add(self._objective >= int(problem.seconds[problem.rank == rank].sum()))
        self.constraints.minimize(self._objective)

    def _add_begins(self, is_prompt: bool, lost: int) -> list[Any]:
        """Return a variable per rank for its begin, from which its span counts.

        A begin can be as late as the rank's first start, or later, so that a bound of the spans holds for every order.

            [1] All ranks begin with one microbatch, each rank as soon as it has come there. The rank of stage 0 begins
                at 0.
            [2] A rank may also begin with another microbatch, which comes at least an F later. This may pay: the rank
                then waits less. When this is depends on all that ran before, so any later time is allowed, in steps: a
                proof tick by tick would not end.
        """
        problem, add = self.problem, self.constraints.add
        forward = problem.plane(np.arange(problem.num_actions), FORWARD)
        ticks_per_hop = _ticks_from_stage_before(problem)
        seconds = problem.plane(problem.seconds, FORWARD).astype(np.int64)
        arrivals, least_arrivals = np.cumsum(ticks_per_hop, axis=0), np.cumsum(ticks_per_hop.min(axis=1))
        step = max(int(seconds.mean()) // STEPS, 1)
        latest_begin = self._horizon + step + lost
        first_microbatches = [group[0] for group in self._groups]
        # Exactly one microbatch is the one that all ranks begin with in [1]. Of microbatches that are alike, it is the
        # first.
        is_chosen = [self.constraints.new_bool_var("") for _ in first_microbatches]
        self.constraints.add_exactly_one(is_chosen)
        begins: list[Any] = []
        for stage in (stages[0] for stages in problem.placement.stages_of_rank):
            starts = [self._starts[forward[stage, microbatch]] for microbatch in first_microbatches]
            begin = self.constraints.new_int_var(0, latest_begin, "")
            is_first = self.constraints.new_bool_var("")  # whether the rank begins with the chosen microbatch
            for literal, microbatch, start in zip(is_chosen, first_microbatches, starts, strict=True):
                add(begin <= start).only_enforce_if(is_first)  # [1]
                add(start == int(arrivals[stage, microbatch])).only_enforce_if(literal, is_first)
                add(begin == int(arrivals[stage, microbatch])).only_enforce_if(literal, is_first)
            begins.append(begin)
            if is_prompt or stage == 0:
                add(is_first == 1)
                continue
            steps = self.constraints.new_int_var(0, latest_begin // step, "")
            add(begin == int(least_arrivals[stage]) + step * steps).only_enforce_if(~is_first)  # [2]
            earliest = int(least_arrivals[stage]) + int(seconds[:stage].min())
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
        columns = timed.start_s, timed.arrival_s
        start_s, arrival_s = (_in_turn(self.problem, self._groups, column) for column in columns)
        leaves = (arrival_s - self.problem.wire_s).astype(np.int64)
        start, end = start_s.astype(np.int64), (start_s + self.problem.seconds).astype(np.int64)
        add_hint = self.constraints.add_hint
        for action, variable in enumerate(self._starts):
            add_hint(variable, int(start[action]))
        for action, variable in self._leaves.items():
            add_hint(variable, int(leaves[action]))
        for index, ((first, second), literal) in enumerate(self.literals.items()):
            if index % 2 == 0:  # each literal is followed by its opposite
                add_hint(literal, bool(end[first] <= start[second]))

    def sequence(self, solver: Any) -> Ints:
        """Return the sequence that a solver has found."""
        return self.sequence_at([solver.value(start) for start in self._starts])

    def sequence_at(self, starts: list[int]) -> Ints:
        """Return all actions in the order of their starts, each after what it waits for.

        Of those that start together, what takes no time comes first, then what frees memory.
        """
        times = enumerate(zip(starts, self._seconds, strict=True))
        keys = [(start, start + seconds, -action) for action, (start, seconds) in times]
        num_missing, sequence = self._waits.sum(axis=0), []
        ready = [keys[action] for action in np.flatnonzero(num_missing == 0)]
        heapq.heapify(ready)
        while ready:
            action = -heapq.heappop(ready)[2]
            sequence.append(action)
            successors = np.flatnonzero(self._waits[action])
            num_missing[successors] -= 1
            for successor in successors[num_missing[successors] == 0]:
                heapq.heappush(ready, keys[successor])
        return np.array(sequence, np.int32)


def _add_if(constraints: Any, literal: Any, claim: Any) -> None:
    added = constraints.add(claim)
    if literal is not True:
        added.only_enforce_if(literal)


def _in_turn(problem: Problem, groups: list[list[int]], column: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a column of times in which microbatches that are alike come in the order of their numbers."""
    table = column.reshape(-1, problem.num_microbatches).copy()
    for group in groups:
        table[:, group] = np.sort(table[:, group], axis=1)
    return table.reshape(-1)


def _ticks_from_stage_before(problem: Problem) -> NDArray[np.int64]:
    """Return the ticks from when a first microbatch comes to the stage before to when it comes to each stage."""
    firsts = [stages[0] for stages in problem.placement.stages_of_rank]
    assert all(first == 0 or first - 1 in firsts for first in firsts), "a rank begins behind the begin of another"
    seconds, wire, lag = (problem.plane(column, FORWARD) for column in (problem.seconds, problem.wire_s, problem.lag_s))
    ways = lag.copy()  # [num_stages, num_microbatches]
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
    """Return whether the second action waits for the first, or comes after it as one alike: a square table."""
    waits = np.zeros((problem.num_actions, problem.num_actions), np.bool_)
    for sources in (problem.source, problem.activation_source):
        actions = np.flatnonzero(sources != NONE)
        waits[sources[actions], actions] = True
    numbers = np.arange(problem.num_actions).reshape(-1, problem.num_microbatches)
    for group in groups:
        waits[numbers[:, group[:-1]], numbers[:, group[1:]]] = True
    return waits


def transitive_closure(waits: Bools) -> Bools:
    """Return whether the second action comes after the first, in any number of waits."""
    while True:
        closure = waits | (waits.astype(np.float32) @ waits.astype(np.float32) > 0)
        if (closure == waits).all():
            return waits
        waits = closure
