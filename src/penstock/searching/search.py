"""`search`: the best order for these costs and this memory, and how far it is from the best possible.

    start     every family of the placement that fits; constructions: sweeps (`sweeps`), list schedules of many settings
    improve   other settings (`varying`), then moves of actions (`moves`), from the best few, until the time is over
    solve     small problems, where OR-tools is installed (`exact`): what is shorter, and a larger bound
    end       the best different ones are lowered, proved under the limit and simulated with their messages (`ending`)
    certify   nothing that is known contradicts the result and its bound (`certifying`)

Where several placements are asked for, each is searched as if it were the only one, and the best result of all counts.
Where messages break the limit, the search's own limit is lowered by what was missing. The result was proved by
the same code that proves any plan, and the certificate is a lower bound that holds for every order (`bounds`).
"""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any, get_args

from penstock.errors import ScheduleError, require_choice
from penstock.placement import Placement
from penstock.proofs import Limit
from penstock.searching.bounds import Bound, lower_bound
from penstock.searching.budget import Budget
from penstock.searching.candidates import Candidate, by_objective, different, of_families
from penstock.searching.certifying import certify
from penstock.searching.ending import finalists_of, shortest, steadiest
from penstock.searching.exact import MOST_ACTIONS, is_installed, solve
from penstock.searching.fitting import Split
from penstock.searching.improving import Improvement
from penstock.searching.listing import list_schedule
from penstock.searching.moves import Moves
from penstock.searching.noise import Measured, shares_of
from penstock.searching.problem import Problem
from penstock.searching.question import Question, cheapest, problems_of, require_number
from penstock.searching.result import OPTIMAL_GAP, Objective, Progress, SearchResult, best_result
from penstock.searching.settings import settings_for
from penstock.searching.split_orders import split_within
from penstock.searching.starting import last_resort, nothing_fits, starts_of
from penstock.searching.sweeps import sequences_of_sweeps
from penstock.simulation.costs.costs import Costs
from penstock.simulation.costs.layer_costs import LayerCosts
from penstock.simulation.engine import require_costs

MOST_FINALISTS = 32
"""The most candidates that are lowered, proved and simulated at the end."""
SHARE_BEFORE_SOLVING = 0.5
"""The share of the time after which the exact method, where there is one, takes the rest."""


def search(
    costs: Costs | LayerCosts,
    ranks: int,
    microbatches: int,
    *,
    memory_limit: Any = None,
    placement: str = "line",
    stages_per_rank: int | None = None,
    per_action: bool = False,
    objective: Objective = "makespan",
    seconds: float = 10.0,
    evaluations: int | None = None,
    noise: float | Measured | None = None,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
    keeps_split: bool = False,
) -> SearchResult:
    """Search for the order of F, I and W that takes least time under a limit of memory.

    `costs` mean what they mean to `penstock compare`: one entry is all that a rank does for a microbatch, as many
    entries as ranks are those of each, and the stages of a rank share them; as many entries as stages are those of the
    stages; `LayerCosts` are split over the stages of each placement. With `per_action` they are those of one action of
    one stage, as for `penstock.simulate`. There are as many stages as their longest field has entries, where these are
    more than one and not as many as ranks, else `ranks` x `stages_per_rank` (1 on a line, else 2).

    `placement`: line, loop, v, wave, or any of these: then each is searched as if it alone were asked for, and the best
    result counts. `memory_limit` is that of `penstock.check`, and holds for the lowered program. `objective`: the
    makespan, for which all ranks wait, or the span of the zero-bubble papers, the longest of a rank. The search of a
    placement ends after so many `seconds`, without compiling on first use; or after so many `evaluations`, where these
    are given: then equal seeds find the same to the bit. With `noise`, the candidate is chosen that is shortest on
    average over 16 perturbed costs: 0.03 is the standard deviation as a share of an action's seconds, "measured" takes
    the costs' own `spreads`. `progress` is called now and then. Ctrl-C ends it; the best so far is returned.

    Where no order of a placement is found within a limit of bytes, `LayerCosts` are split in another way in which a
    known order fits, and that split is searched (`SearchResult.split`), unless `keeps_split`.

    Raises:
        ConfigError: for a value that an argument cannot have, or costs that do not know F, I and W.
        ScheduleError: where no order fits the limit that this search could find; it says what would.
        AssertionError: where a registered family is shorter than the result, or the result than its bound: a bug.
    """
    _require_values(costs, objective, seconds, ranks=ranks, microbatches=microbatches, evaluations=evaluations)
    shape = (ranks, microbatches, placement, stages_per_rank, memory_limit)

    limit = None if memory_limit is None else Limit.read(memory_limit)
    layer_costs = costs if isinstance(costs, LayerCosts) and not keeps_split and limit and limit.in_bytes else None

    def costs_with(split: Split) -> Costs | LayerCosts:
        return replace(layer_costs, split=split) if layer_costs is not None and split else costs

    def searches_of(split: Split = ()) -> Iterator[_Search]:
        """Yield a search of each placement, in which costs per layer have a split, or the usual one."""
        for problem, stage_costs in problems_of(costs_with(split), *shape, per_action=per_action):
            shares = None if noise is None else shares_of(noise, stage_costs, problem.num_stages)
            question = Question(stage_costs, objective == "span", memory_limit, shares, seed)
            budget, is_last_split = Budget(seconds, evaluations), layer_costs is None or bool(split)
            yield _Search(problem, question, budget, progress, split, is_last_split=is_last_split)

    def resplit(placement: Placement) -> _Search | None:
        """Return the search of a placement with a split in which a known order fits; None where none does."""
        if limit is None or layer_costs is None:
            return None
        try:
            _, split = split_within(layer_costs, [placement], microbatches, limit)
        except ScheduleError:
            return None
        return next(search for search in searches_of(split) if search.placement == placement)

    searches = list(searches_of())
    placements = [search.placement for search in searches]
    _compile(placements)
    try:
        result = _best_of(searches, None if layer_costs is None else resplit)
    except ScheduleError:
        if limit is not None and layer_costs is not None:
            split_within(layer_costs, placements, microbatches, limit)  # it refuses, and names what needs least
        raise
    costs_of_placement = {search.placement: costs_with(search.split) for search in searches}
    try:
        certify(result, costs_of_placement, memory_limit, per_action=per_action)
    except KeyboardInterrupt:  # the result is proved; only the last look at it was cut short
        return replace(result, was_interrupted=True)
    return result


def _require_values(costs: Costs | LayerCosts, objective: object, seconds: object, **numbers: object) -> None:
    """Refuse a value that an argument of `search` cannot have. Raises: ConfigError."""
    if not isinstance(costs, LayerCosts):
        require_costs(costs)
    require_choice("objective", objective, get_args(Objective))
    for key, number in numbers.items():
        if number is not None or key != "evaluations":
            require_number(key, number, at_least=1)
    require_number("seconds", seconds, at_least=0, is_whole=False)


def _best_of(searches: list["_Search"], resplit: Callable[[Placement], "_Search | None"] | None = None) -> SearchResult:
    """Search the placements one after another, those with the least lower bound first; return the best result.

    A placement whose bound is not below the best result so far is left out, unless its layers may be split in another
    way: its bound holds for the usual split alone. Where no order fits with the usual split, `resplit` gives the search
    with another split, which takes the first one's place in `searches`. The least bound of all searches is that of the
    result. Ctrl-C ends the search early, and is raised again if there is no result yet.

    Raises:
        ScheduleError: nothing fits the memory limit on any placement.
    """
    results: list[SearchResult] = []
    was_interrupted = False
    for search in sorted(searches, key=lambda search: search.bound.seconds):
        best = best_result(results) if results else None
        is_needless = best is not None and best.noise is None and search.bound.seconds >= best.objective_s
        if is_needless and resplit is None:
            continue
        try:
            results += _results_of(search, searches, best, sum(result.seconds for result in results), resplit)
        except KeyboardInterrupt:
            if best is None:
                raise
            was_interrupted = True
        if was_interrupted or any(result.was_interrupted for result in results):
            was_interrupted = True
            break
    if not results:
        raise nothing_fits([(search.problem, search.question) for search in searches])
    # A bound by the solver holds for the result only if every placement has one.
    solver_bounds_s = [search.solver_bound_s for search in searches if search.solver_bound_s is not None]
    return replace(
        best_result(results),
        bound=min((search.bound for search in searches), key=lambda bound: bound.seconds),
        seconds=sum(result.seconds for result in results),
        evaluations=sum(result.evaluations for result in results),
        solver_bound_s=min(solver_bounds_s) if len(solver_bounds_s) == len(searches) else None,
        was_interrupted=was_interrupted,
    )


def _results_of(
    search: "_Search",
    searches: list["_Search"],
    best: SearchResult | None,
    seconds_before: float,
    resplit: Callable[[Placement], "_Search | None"] | None,
) -> list[SearchResult]:
    """Return the best order of a search, or nothing where none fits with any known split; `best` is the best so far."""
    results = search.run(best, seconds_before, min(search.bound.seconds for search in searches))
    new_search = None if results or resplit is None else resplit(search.placement)
    if new_search is None:
        return results
    searches[searches.index(search)] = new_search
    return new_search.run(best, seconds_before, min(search.bound.seconds for search in searches))


class _Search:
    """The search of one placement."""

    def __init__(
        self,
        problem: Problem,
        question: Question,
        budget: Budget,
        progress: Callable[[Progress], None] | None,
        split: Split = (),
        *,
        is_last_split: bool = True,
    ) -> None:
        """Take the question of a placement; with `is_last_split`, where nothing fits, try one microbatch at a time."""
        self.problem, self.placement, self.question, self.split = problem, problem.placement, question, split
        self._is_last_split = is_last_split
        self._budget, self._progress = budget, progress
        self._cheapest = cheapest(problem, question.costs)
        self.bound: Bound = lower_bound(self._cheapest, by_span=question.by_span)
        """The largest lower bound so far, which the exact method may raise."""
        self.solver_bound_s: float | None = None
        self._best_s, self._seconds_before, self._least_bound_s = math.inf, 0.0, 0.0
        self._families: list[Candidate] = []
        self._searched: list[Candidate] = []
        self._last_resort: list[Candidate] = []

    def run(self, best: SearchResult | None, seconds_before: float, least_bound_s: float) -> list[SearchResult]:
        """Return the best order that fits, or nothing where none was found. Raises: KeyboardInterrupt, before any.

        Progress is that of all placements: `best` is the best result of earlier placements, `seconds_before` the time
        that they took, and `least_bound_s` the least bound of all.
        """
        self._least_bound_s = least_bound_s
        if best is not None:
            self._best_s, self._seconds_before = best.objective_s, seconds_before
        self._budget.begin()
        results = self._run_from(self._first_candidates)
        return results if results or not self._is_last_split else self._run_from(self._last_candidates)

    def _run_from(self, start: Callable[[], list[Candidate]]) -> list[SearchResult]:
        was_interrupted = False
        try:
            self._improve(start())
            if self._has_exact_method:
                self._solve()
        except KeyboardInterrupt:
            was_interrupted = True
        return self._final_results(was_interrupted=was_interrupted)

    @property
    def _goal_s(self) -> float:
        """The seconds of an order that no other one can beat."""
        return self.bound.seconds * (1 + OPTIMAL_GAP)

    @property
    def _has_exact_method(self) -> bool:
        """Whether the exact method gets a share of the time."""
        is_small = self.problem.num_actions <= MOST_ACTIONS
        return is_small and not self._budget.counts_evaluations and is_installed()

    def _first_candidates(self) -> list[Candidate]:
        self._families = list(of_families(self.problem, by_span=self.question.by_span))
        self._budget.spent += len(self._families)
        starts = starts_of(self.problem, self._families, self.question, self._budget)
        self._searched += [start for start in starts if start.method != "family"]
        return starts

    def _last_candidates(self) -> list[Candidate]:
        """Return the last resort; earlier candidates are left out, because all of them break the limit."""
        self._last_resort = last_resort(self.problem, self.question)
        self._searched = list(self._last_resort)
        return self._last_resort

    def _improve(self, candidates: list[Candidate]) -> None:
        share = SHARE_BEFORE_SOLVING if self._has_exact_method else 1.0
        improvement = Improvement(self.question, self._budget, self._goal_s, share, self._report)
        try:
            improvement.run(candidates)
        finally:  # what was improved before an interrupt counts
            self._searched += improvement.improved

    def _report(self, candidate_s: float) -> None:
        self._best_s = min(self._best_s, candidate_s)
        if self._progress is not None:
            seconds = self._seconds_before + self._budget.elapsed_s
            self._progress(Progress(seconds, self._best_s, self._least_bound_s))

    def _solve(self) -> None:
        """Let the exact method raise the bound, and find what is shorter, in the time that is left."""
        by_span = self.question.by_span
        fitting = [candidate for candidate in [*self._searched, *self._families] if candidate.fits]
        start = min(fitting, key=by_objective, default=None)
        if start is None or self._budget.is_over or start.objective_s <= self._goal_s:
            return
        options: dict[str, Any] = {"by_span": by_span, "seconds": self._budget.left_s, "seed": self.question.seed}
        solution = solve(self._cheapest, start.sequence, **options)
        self.solver_bound_s = solution.bound_s
        if self.bound.seconds < solution.bound_s < math.inf:
            self.bound = Bound("exact", None, {"proved by CP-SAT": solution.bound_s})
        if solution.sequence is not None:
            self._searched.append(Candidate.of(self.problem, solution.sequence, "exact", by_span=by_span))
        if solution.was_interrupted:
            raise KeyboardInterrupt

    def _final_results(self, *, was_interrupted: bool) -> list[SearchResult]:
        """Return the best order of this placement as a list of one result, or an empty list where none fits.

        Candidates were measured by the search's own timing. The best few, and the families, are now lowered, proved and
        simulated, and the shortest or, under noise, the one with the shortest mean is taken. A search that Ctrl-C ended
        raises KeyboardInterrupt if nothing fits.
        """
        # Prove and simulate the best candidates.
        question, by_span = self.question, self.question.by_span
        best_few = different(sorted(self._searched, key=by_objective))[:MOST_FINALISTS]
        candidates = [*best_few, *self._last_resort, *self._families]
        finalists = finalists_of(candidates, question.costs, question.memory_limit, by_span=by_span)
        if not finalists and was_interrupted:
            raise KeyboardInterrupt
        if not finalists:
            return []
        # Choose: by the objective or, where durations vary from step to step, by its mean under such noise.
        best, noise = shortest(finalists), None
        if question.noise_shares is not None:
            best, noise = steadiest(finalists, question.noise_shares, question.seed, by_span=by_span)
        return [
            SearchResult(
                plan=best.plan,
                costs=question.costs,
                bound=self.bound,
                method=best.candidate.method,
                objective="span" if by_span else "makespan",
                seconds=self._budget.elapsed_s,
                evaluations=self._budget.spent,
                noise=noise,
                solver_bound_s=self.solver_bound_s,
                was_interrupted=was_interrupted,
                split=self.split,
            )
        ]


def _compile(placements: Collection[Placement]) -> None:
    """Compile all loops that these placements need, which takes seconds on first use."""
    for placement in placements:
        list(sequences_of_sweeps(Problem.of(placement, 1, Costs.uniform())))
    problem = Problem.of(Placement.line(1), 1, Costs.uniform())
    sequence = list_schedule(problem, next(settings_for(problem)))
    assert sequence is not None
    Moves(problem, 0).improve(sequence, sequence, math.inf, 1, 0.0)
