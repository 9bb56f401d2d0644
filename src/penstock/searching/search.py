"""`search`: the best order for these costs and this memory, and how far it is from the best possible.

    start     every family of the shape that fits, and list schedules of many settings
    improve   moves of actions (`improving`), from the best few, until the time is over
    end       the best different ones are lowered, proved under the limit and simulated with their messages

Where messages break the limit, the search's own limit is lowered by what was missing. What is returned was proved by
the same code that proves any plan, and the certificate is a lower bound that holds for every order (`bounds`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np

from penstock.errors import ScheduleError, count_of
from penstock.ir.live import peak_bytes
from penstock.ir.schedule import Schedule
from penstock.ir.timeline import Timeline
from penstock.lowering import lower
from penstock.placement import Placement
from penstock.planning import Plan, plan
from penstock.proofs import Limit
from penstock.searching.asked import cheapest, problems_of, require_choice, require_number, sizes_and_limit
from penstock.searching.bounds import Bound, lower_bound
from penstock.searching.budget import Budget
from penstock.searching.candidates import Candidate, Method, by_objective, different, of_families, of_lists
from penstock.searching.improving import Moves
from penstock.searching.listing import list_schedule
from penstock.searching.problem import FORWARD, Bytes, Problem, every_action
from penstock.searching.settings import settings_for
from penstock.simulation.costs.costs import Costs
from penstock.simulation.engine import require_costs

Objective = Literal["makespan", "span"]
NUM_ENDED = 32
"""Candidates that are lowered, proved and simulated at the end, at most."""
NUM_IMPROVED = 4
"""From which improvement begins, in turns."""
NUM_ROUNDS = 12
"""In which a run of improvement cools down."""
NUM_TIGHTENED = 3
"""Times that the limit is lowered to make room for messages."""
TEMPERATURES = (0.02, 0.002, 0.0002)
"""At which runs of improvement begin, in turns: shares of the objective."""
COOLING = 0.6
"""What is left of a temperature after a round."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a search is."""

    seconds: float
    best_s: float
    """The objective of the best candidate so far, before its messages are known."""
    bound_s: float

    @property
    def gap(self) -> float:
        return _gap(self.best_s, self.bound_s)


@dataclass(frozen=True, slots=True, eq=False)
class SearchResult:
    """The result of a search."""

    plan: Plan
    """Proved under the limit."""
    bound: Bound
    """The largest lower bound, and its terms."""
    method: Method
    """Where the schedule comes from."""
    objective: Objective
    seconds: float
    """That the search took."""
    evaluations: int
    """Sequences that were timed."""
    was_interrupted: bool = False
    """Whether Ctrl-C ended it before its time."""

    @property
    def schedule(self) -> Schedule:
        return self.plan.schedule

    @property
    def timeline(self) -> Timeline:
        return self.plan.timeline

    @property
    def makespan_s(self) -> float:
        return self.timeline.makespan_s

    @property
    def span_s(self) -> float:
        """The longest of a rank, from its first start to its last end."""
        return self.timeline.span_s

    @property
    def lower_bound_s(self) -> float:
        """Of the objective: no order of the placements that were asked for can go below it."""
        return self.bound.seconds

    @property
    def gap(self) -> float:
        """By how much the result is above the bound, as a share of it."""
        return _gap(self.makespan_s if self.objective == "makespan" else self.span_s, self.lower_bound_s)

    @property
    def is_optimal(self) -> bool:
        """Whether the bound is reached, but for rounding."""
        return self.gap <= OPTIMAL_GAP

    @property
    def peak_bytes(self) -> list[int]:
        """Per rank, with what is always there."""
        pairs = zip(self.timeline.peak_bytes, self.timeline.static_bytes, strict=True)
        return [peak + static for peak, static in pairs]


OPTIMAL_GAP = 1e-9
ROUNDING = 1e-12


def search(
    costs: Costs,
    ranks: int,
    microbatches: int,
    *,
    memory_limit: Any = None,
    placement: str = "line",
    stages_per_rank: int | None = None,
    objective: Objective = "makespan",
    seconds: float = 10.0,
    evaluations: int | None = None,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """Search for the order of F, I and W that takes least time under a limit of memory.

    `costs` are per stage, as for `penstock.simulate`; there are as many stages as their longest field has entries, else
    `ranks` x `stages_per_rank` (1 on a line, else 2). `placement`: line, loop, v, wave, or any of these.
    `memory_limit` is that of `penstock.check`, and holds for the lowered program. `objective`: the makespan, for which
    all ranks wait, or the span of the zero-bubble papers, the longest of a rank. The search ends after so many
    `seconds`, without compiling on first use; or after so many `evaluations`, where these are given: then equal seeds
    find the same to the bit. `progress` is called now and then. Ctrl-C ends it; the best so far is returned.

    Raises:
        ConfigError: for a value that an argument cannot have, or costs that do not know F, I and W.
        ScheduleError: where no order fits the limit that this search could find; it says what would.
    """
    require_costs(costs)
    require_choice("objective", objective, get_args(Objective))
    for key, number in (("ranks", ranks), ("microbatches", microbatches), ("evaluations", evaluations)):
        if number is not None or key != "evaluations":
            require_number(key, number, at_least=1)
    require_number("seconds", seconds, at_least=0, is_whole=False)
    problems = [*problems_of(costs, ranks, microbatches, placement, stages_per_rank, memory_limit)]
    return _Search(problems, costs, objective, memory_limit, Budget(seconds, evaluations), seed, progress).run()


def _gap(found_s: float, bound_s: float) -> float:
    gap = found_s / bound_s - 1 if bound_s else 0.0
    return 0.0 if abs(gap) < ROUNDING else gap


# ---- the search


class _Search:
    """One search over some problems."""

    def __init__(
        self,
        problems: list[Problem],
        costs: Costs,
        objective: Objective,
        memory_limit: Any,
        budget: Budget,
        seed: int,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._problems, self._costs, self._objective = problems, costs, objective
        self._memory_limit, self._budget, self._seed, self._progress = memory_limit, budget, seed, progress
        self._by_span = objective == "span"
        self._was_interrupted = False
        self._bounds = [lower_bound(cheapest(problem, costs), by_span=self._by_span) for problem in problems]
        self._bound = min(self._bounds, key=lambda bound: bound.seconds)

    def run(self) -> SearchResult:
        _compile()
        self._budget.begin()
        families, lists = [], []
        for problem in self._problems:
            own = list(of_families(problem, by_span=self._by_span))
            self._budget.spent += len(own)
            families += own
            lists += self._started(problem, own)
        searched = [each for each in lists if each.method != "family"]
        try:
            self._improve(lists, searched)
        except KeyboardInterrupt:
            self._was_interrupted = True
        return self._end(families, searched)

    # ---- start

    def _started(self, problem: Problem, families: list[Candidate]) -> list[Candidate]:
        """Return list schedules, and families that fit, under a limit that leaves room for messages.

        What messages need is what the best ones show.
        """
        for _ in range(NUM_TIGHTENED):
            found = self._fitting(problem, families)
            missing = self._missing(found[0]) if found else np.zeros(1, np.int64)
            if not missing.any():
                return found
            problem = problem.within(problem.limit - missing)
        return self._fitting(problem, families) or found

    def _fitting(self, problem: Problem, families: list[Candidate]) -> list[Candidate]:
        """Return the list schedules and families that fit under the limit of a problem, the best first."""
        found = list(of_lists(problem, by_span=self._by_span, is_over=lambda: self._budget.is_over))
        self._budget.spent += len(found)
        of = partial(Candidate.of, problem, method="family", by_span=self._by_span)
        found += [of(each.sequence, family=each.family) for each in families]
        return sorted((each for each in found if each.fits), key=by_objective)[:NUM_ENDED]

    def _missing(self, candidate: Candidate) -> Bytes:
        """[num_ranks] by how much its program is above the limit."""
        if self._memory_limit is None:
            return np.zeros(1, np.int64)
        program, limit = lower(candidate.schedule()), Limit.read(self._memory_limit)
        sizes, most = sizes_and_limit(program, self._costs, limit)
        return np.maximum(np.array(peak_bytes(program, sizes)) - most, 0)

    # ---- improve

    def _improve(self, candidates: list[Candidate], found: list[Candidate]) -> None:
        """Improve the best few in turns until the budget is over; the best of each run is added to what was found."""
        starts = sorted((each for each in candidates if each.fits), key=by_objective)[:NUM_IMPROVED]
        moves = {id(each.problem): Moves(each.problem, self._seed, by_span=self._by_span) for each in starts}
        best = starts[0] if starts else None
        goal_s = self._bound.seconds * (1 + OPTIMAL_GAP)
        turn = 0
        while best is not None and not self._budget.is_over and best.objective_s > goal_s:
            start = best if turn % 2 else starts[turn // 2 % len(starts)]
            turn += 1
            of_run = self._cool_down(moves[id(start.problem)], start, TEMPERATURES[turn % len(TEMPERATURES)])
            if of_run.objective_s < start.objective_s:
                found.append(of_run)
            best = min(best, of_run, key=by_objective)

    def _cool_down(self, moves: Moves, start: Candidate, temperature: float) -> Candidate:
        sequence, best, best_s = start.sequence, start.sequence, start.objective_s
        temperature_s = temperature * best_s
        for _ in range(NUM_ROUNDS):
            num_moves = self._budget.next_moves()
            if self._budget.is_over or not num_moves:
                break
            improved = moves.improve(sequence, best, best_s, num_moves, temperature_s)
            sequence, best, best_s = improved.sequence, improved.best, improved.best_s
            temperature_s *= COOLING
            self._budget.spent += num_moves
            if self._progress is not None:
                self._progress(Progress(self._budget.elapsed_s, best_s, self._bound.seconds))
        return Candidate(start.problem, best, best_s, "improved" if best_s < start.objective_s else start.method)

    # ---- end

    def _end(self, families: list[Candidate], searched: list[Candidate]) -> SearchResult:
        """Lower, prove and simulate the best ones; return the best of them, of equally short ones that holds least."""
        found: list[tuple[float, float, Plan, Method]] = []
        for candidate in [*different(sorted(searched, key=by_objective))[:NUM_ENDED], *families]:
            try:
                planned = plan(candidate.schedule(), self._costs, memory_limit=self._memory_limit)
            except ScheduleError:  # it breaks the limit, maybe by its messages
                continue
            timeline = planned.timeline
            objective_s = timeline.span_s if self._by_span else timeline.makespan_s
            held = max(timeline.peak_bytes) or max(timeline.peak_activations)
            found.append((objective_s, held, planned, candidate.method))
        if not found:
            raise self._nothing_fits()
        shortest_s = min(objective_s for objective_s, *_ in found) * (1 + OPTIMAL_GAP)
        _, _, best, method = min((each for each in found if each[0] <= shortest_s), key=lambda each: each[1])
        spent = self._budget.elapsed_s, self._budget.spent
        return SearchResult(best, self._bound, method, self._objective, *spent, self._was_interrupted)

    def _nothing_fits(self) -> ScheduleError:
        """Say what one microbatch leaves on a rank before its first I there, which no order can do without."""
        rank, amount = min((self._least_of(problem) for problem in self._problems), key=lambda each: each[1])
        is_in_bytes = Limit.read(self._memory_limit).in_bytes
        held = f"{amount:,} bytes, messages apart" if is_in_bytes else count_of(amount, "activation")
        return ScheduleError(
            f"no order was found that fits a limit of {self._memory_limit}; with one microbatch at a time, which needs "
            f"least, rank {rank} holds {held}. Raise the limit, or give more ranks or smaller stages"
        )

    def _least_of(self, problem: Problem) -> tuple[int, int]:
        """Return the rank that holds most where one microbatch is under way, and how much that is."""
        table = every_action(problem.placement, problem.num_microbatches)
        sizes, _ = sizes_and_limit(table, self._costs, Limit.read(self._memory_limit))
        of_stages = problem.plane(problem.taken, FORWARD).max(axis=1)
        held = sizes.static_of_ranks(problem.placement)
        np.add.at(held, np.array(problem.placement.rank_of_stage), of_stages)
        return int(held.argmax()), int(held.max())


def _compile() -> None:
    """Compile all loops, which takes seconds on first use."""
    few = Problem.of(Placement.line(1), 1, Costs.uniform())
    sequence = list_schedule(few, next(settings_for(few)))
    assert sequence is not None
    Moves(few, 0).improve(sequence, sequence, math.inf, 1, 0.0)
