"""`search`: the best order for these costs and this memory, and how far it is from the best possible.

    start     every family of the shape that fits; constructions: sweeps (`sweeps`), list schedules of many settings
    improve   other settings (`varying`), then moves of actions (`moves`), from the best few, until the time is over
    solve     small problems, where OR-tools is installed (`exact`): what is shorter, and a larger bound
    end       the best different ones are lowered, proved under the limit and simulated with their messages (`ending`)

Where messages break the limit, the search's own limit is lowered by what was missing. The result was proved by
the same code that proves any plan, and the certificate is a lower bound that holds for every order (`bounds`).
"""

import math
from collections.abc import Callable
from typing import Any, get_args

from penstock.errors import require_choice
from penstock.placement import Placement
from penstock.searching.asked import Asked, cheapest, problems_of, require_number
from penstock.searching.bounds import Bound, lower_bound
from penstock.searching.budget import Budget
from penstock.searching.candidates import Candidate, by_objective, different, of_families
from penstock.searching.ending import planned, shortest, steadiest
from penstock.searching.exact import MOST_ACTIONS, is_installed, solve
from penstock.searching.improving import Improvement
from penstock.searching.listing import list_schedule
from penstock.searching.moves import Moves
from penstock.searching.noise import Measured, shares_of
from penstock.searching.problem import Problem
from penstock.searching.result import OPTIMAL_GAP, Objective, Progress, SearchResult
from penstock.searching.settings import settings_for
from penstock.searching.starting import nothing_fits, starts_of
from penstock.searching.sweeps import sequences_of_sweeps
from penstock.simulation.costs.costs import Costs
from penstock.simulation.engine import require_costs

NUM_ENDED = 32
"""Candidates that are lowered, proved and simulated at the end, at most."""
SHARE_BEFORE_SOLVING = 0.5
"""Of the time, where the exact method takes the rest."""


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
    noise: float | Measured | None = None,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """Search for the order of F, I and W that takes least time under a limit of memory.

    `costs` are per stage, as for `penstock.simulate`; there are as many stages as their longest field has entries, else
    `ranks` x `stages_per_rank` (1 on a line, else 2). `placement`: line, loop, v, wave, or any of these.
    `memory_limit` is that of `penstock.check`, and holds for the lowered program. `objective`: the makespan, for which
    all ranks wait, or the span of the zero-bubble papers, the longest of a rank. The search ends after so many
    `seconds`, without compiling on first use; or after so many `evaluations`, where these are given: then equal seeds
    find the same to the bit. With `noise`, the candidate is chosen that is shortest on average over 16 perturbed costs:
    0.03 is the standard deviation as a share of an action's seconds, "measured" takes the costs' own `spreads`.
    `progress` is called now and then. Ctrl-C ends it; the best so far is returned.

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
    shares = None if noise is None else shares_of(noise, costs, problems[0].num_stages)
    asked = Asked(costs, objective == "span", memory_limit, shares, seed)
    return _Search(problems, asked, Budget(seconds, evaluations), progress).run()


class _Search:
    """One search over some problems."""

    def __init__(
        self, problems: list[Problem], asked: Asked, budget: Budget, progress: Callable[[Progress], None] | None
    ) -> None:
        self._problems, self._asked, self._budget, self._progress = problems, asked, budget, progress
        self._cheapest = [cheapest(problem, asked.costs) for problem in problems]
        self._bounds = [lower_bound(problem, by_span=asked.by_span) for problem in self._cheapest]
        self._solver_bounds_s: list[float] = []
        self._best_s = math.inf
        self._families: list[Candidate] = []
        self._searched: list[Candidate] = []

    def run(self) -> SearchResult:
        _compile(self._problems)
        self._budget.begin()
        was_interrupted = False
        try:
            self._improve(self._start())
            if self._is_solved:
                self._solve()
        except KeyboardInterrupt:
            was_interrupted = True
        return self._end(was_interrupted=was_interrupted)

    @property
    def _bound(self) -> Bound:
        """Of the placement that allows most."""
        return min(self._bounds, key=lambda bound: bound.seconds)

    @property
    def _goal_s(self) -> float:
        """Nothing is shorter."""
        return self._bound.seconds * (1 + OPTIMAL_GAP)

    @property
    def _is_solved(self) -> bool:
        """Whether the exact method gets a share of the time."""
        is_small = all(problem.num_actions <= MOST_ACTIONS for problem in self._problems)
        return is_small and not self._budget.counts_evaluations and is_installed()

    def _start(self) -> list[Candidate]:
        found = []
        for problem in self._problems:
            families = list(of_families(problem, by_span=self._asked.by_span))
            self._families += families
            self._budget.spent += len(families)
            starts = starts_of(problem, families, self._asked, self._budget)
            self._searched += [each for each in starts if each.method != "family"]
            found += starts
        return found

    def _improve(self, candidates: list[Candidate]) -> None:
        share = SHARE_BEFORE_SOLVING if self._is_solved else 1.0
        improvement = Improvement(self._asked, self._budget, self._goal_s, share, self._report)
        try:
            improvement.run(candidates)
        finally:  # an interrupt too leaves what was found
            self._searched += improvement.found

    def _report(self, found_s: float) -> None:
        self._best_s = min(self._best_s, found_s)
        if self._progress is not None:
            self._progress(Progress(self._budget.elapsed_s, self._best_s, self._bound.seconds))

    def _solve(self) -> None:
        """Let the exact method raise the bounds, and find what is shorter, in the time that is left."""
        by_span, seed = self._asked.by_span, self._asked.seed
        for index, problem in enumerate(self._problems):
            fitting = [each for each in [*self._searched, *self._families] if each.fits]
            own = [each for each in fitting if each.problem.placement == problem.placement]
            if not own or self._budget.is_over or min(each.objective_s for each in fitting) <= self._goal_s:
                return
            start, left_s = min(own, key=by_objective), self._budget.left_s / (len(self._problems) - index)
            solved = solve(self._cheapest[index], start.sequence, by_span=by_span, seconds=left_s, seed=seed)
            self._solver_bounds_s.append(solved.bound_s)
            if self._bounds[index].seconds < solved.bound_s < math.inf:
                self._bounds[index] = Bound("exact", None, {"proved by CP-SAT": solved.bound_s})
            if solved.sequence is not None:
                self._searched.append(Candidate.of(problem, solved.sequence, "exact", by_span=by_span))
            if solved.was_interrupted:
                raise KeyboardInterrupt

    def _end(self, *, was_interrupted: bool) -> SearchResult:
        asked, by_span = self._asked, self._asked.by_span
        best_few = [*different(sorted(self._searched, key=by_objective))[:NUM_ENDED], *self._families]
        found = planned(best_few, asked.costs, asked.memory_limit, by_span=by_span)
        if not found and was_interrupted:
            raise KeyboardInterrupt
        if not found:
            raise nothing_fits(self._problems, asked)
        best, noise = shortest(found), None
        if asked.noise_shares is not None:
            best, noise = steadiest(found, asked.noise_shares, asked.seed, by_span=by_span)
        has_all = len(self._solver_bounds_s) == len(self._problems)
        return SearchResult(
            plan=best.plan,
            bound=self._bound,
            method=best.candidate.method,
            objective="span" if by_span else "makespan",
            seconds=self._budget.elapsed_s,
            evaluations=self._budget.spent,
            noise=noise,
            solver_bound_s=min(self._solver_bounds_s) if has_all else None,
            was_interrupted=was_interrupted,
        )


def _compile(problems: list[Problem]) -> None:
    """Compile all loops that these problems need, which takes seconds on first use."""
    for placement in {problem.placement for problem in problems}:
        list(sequences_of_sweeps(Problem.of(placement, 1, Costs.uniform())))
    few = Problem.of(Placement.line(1), 1, Costs.uniform())
    sequence = list_schedule(few, next(settings_for(few)))
    assert sequence is not None
    Moves(few, 0).improve(sequence, sequence, math.inf, 1, 0.0)
