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
from penstock.searching.asked import Asked, cheapest, problems_of, require_number
from penstock.searching.bounds import Bound, lower_bound
from penstock.searching.budget import Budget
from penstock.searching.candidates import Candidate, by_objective, different, of_families
from penstock.searching.certifying import certify
from penstock.searching.ending import planned, shortest, steadiest
from penstock.searching.exact import MOST_ACTIONS, is_installed, solve
from penstock.searching.fitting import Split
from penstock.searching.improving import Improvement
from penstock.searching.listing import list_schedule
from penstock.searching.moves import Moves
from penstock.searching.noise import Measured, shares_of
from penstock.searching.problem import Problem
from penstock.searching.result import OPTIMAL_GAP, Objective, Progress, SearchResult, best_result
from penstock.searching.settings import settings_for
from penstock.searching.split_orders import split_within
from penstock.searching.starting import last_resort, nothing_fits, starts_of
from penstock.searching.sweeps import sequences_of_sweeps
from penstock.simulation.costs.costs import Costs
from penstock.simulation.costs.layer_costs import LayerCosts
from penstock.simulation.engine import require_costs

NUM_ENDED = 32
"""Candidates that are lowered, proved and simulated at the end, at most."""
SHARE_BEFORE_SOLVING = 0.5
"""Of the time, where the exact method takes the rest."""


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
    _require_values(costs, objective, ranks=ranks, microbatches=microbatches, evaluations=evaluations, seconds=seconds)
    shape = (ranks, microbatches, placement, stages_per_rank, memory_limit)

    limit = None if memory_limit is None else Limit.read(memory_limit)
    layer_costs = costs if isinstance(costs, LayerCosts) and not keeps_split and limit and limit.in_bytes else None

    def costs_with(split: Split) -> Costs | LayerCosts:
        return replace(layer_costs, split=split) if layer_costs is not None and split else costs

    def searches_of(split: Split = ()) -> Iterator[_Search]:
        """Yield a search of each placement, in which costs per layer have a split, or the usual one."""
        for problem, own_costs in problems_of(costs_with(split), *shape, per_action=per_action):
            shares = None if noise is None else shares_of(noise, own_costs, problem.num_stages)
            asked = Asked(own_costs, objective == "span", memory_limit, shares, seed)
            budget, is_last_split = Budget(seconds, evaluations), layer_costs is None or bool(split)
            yield _Search(problem, asked, budget, progress, split, is_last_split=is_last_split)

    def resplit(placement: Placement) -> _Search | None:
        """Return the search of a placement with a split in which a known order fits; None where none does."""
        if limit is None or layer_costs is None:
            return None
        try:
            _, split = split_within(layer_costs, [placement], microbatches, limit)
        except ScheduleError:
            return None
        return next(one for one in searches_of(split) if one.problem.placement == placement)

    searches = list(searches_of())
    placements = [one.problem.placement for one in searches]
    _compile(placements)
    try:
        result = _best_of(searches, None if layer_costs is None else resplit)
    except ScheduleError:
        if limit is not None and layer_costs is not None:
            split_within(layer_costs, placements, microbatches, limit)  # it refuses, and names what needs least
        raise
    costs_of_placement = {one.problem.placement: costs_with(one.split) for one in searches}
    try:
        certify(result, costs_of_placement, memory_limit, per_action=per_action)
    except KeyboardInterrupt:  # the result is proved; only the last look at it was cut short
        return replace(result, was_interrupted=True)
    return result


def _require_values(
    costs: Costs | LayerCosts,
    objective: object,
    *,
    ranks: object,
    microbatches: object,
    evaluations: object,
    seconds: object,
) -> None:
    """Refuse a value that an argument of `search` cannot have. Raises: ConfigError."""
    if not isinstance(costs, LayerCosts):
        require_costs(costs)
    require_choice("objective", objective, get_args(Objective))
    for key, number in (("ranks", ranks), ("microbatches", microbatches), ("evaluations", evaluations)):
        if number is not None or key != "evaluations":
            require_number(key, number, at_least=1)
    require_number("seconds", seconds, at_least=0, is_whole=False)


def _best_of(searches: list["_Search"], resplit: Callable[[Placement], "_Search | None"] | None = None) -> SearchResult:
    """Search the placements one after the other, those first whose bounds allow most; return the best result.

    A placement whose bound is not below a result needs no search, unless its layers may be split in another way: its
    bound holds for the usual split. Where the usual split leaves no order, `resplit` gives the search with another one,
    which takes the place of the first in `searches`. No order of any of these searches is below the least bound.
    """
    results: list[SearchResult] = []
    was_interrupted = False
    for one in sorted(searches, key=lambda one: one.bound.seconds):
        chosen = best_result(results) if results else None
        is_needless = chosen is not None and chosen.noise is None and one.bound.seconds >= chosen.objective_s
        if is_needless and resplit is None:
            continue
        try:
            results += _results_of(one, searches, chosen, sum(result.seconds for result in results), resplit)
        except KeyboardInterrupt:
            if chosen is None:
                raise
            was_interrupted = True
        if was_interrupted or any(result.was_interrupted for result in results):
            was_interrupted = True
            break
    if not results:
        raise nothing_fits([(one.problem, one.asked) for one in searches])
    solver_bounds_s = [one.solver_bound_s for one in searches if one.solver_bound_s is not None]
    return replace(
        best_result(results),
        bound=min((one.bound for one in searches), key=lambda bound: bound.seconds),
        seconds=sum(result.seconds for result in results),
        evaluations=sum(result.evaluations for result in results),
        solver_bound_s=min(solver_bounds_s) if len(solver_bounds_s) == len(searches) else None,
        was_interrupted=was_interrupted,
    )


def _results_of(
    one: "_Search",
    searches: list["_Search"],
    chosen: SearchResult | None,
    seconds_before: float,
    resplit: Callable[[Placement], "_Search | None"] | None,
) -> list[SearchResult]:
    """Return the best order of one of the searches, or nothing where none fits with any split that is known."""
    results = one.run(chosen, seconds_before, min(other.bound.seconds for other in searches))
    other_split = None if results or resplit is None else resplit(one.problem.placement)
    if other_split is None:
        return results
    searches[searches.index(one)] = other_split
    return other_split.run(chosen, seconds_before, min(other.bound.seconds for other in searches))


class _Search:
    """The search of one placement."""

    def __init__(
        self,
        problem: Problem,
        asked: Asked,
        budget: Budget,
        progress: Callable[[Progress], None] | None,
        split: Split = (),
        *,
        is_last_split: bool = True,
    ) -> None:
        """`is_last_split` says whether it tries one microbatch at a time where nothing else fits."""
        self.problem, self.asked, self.split = problem, asked, split
        self._is_last_split = is_last_split
        self._budget, self._progress = budget, progress
        self._cheapest = cheapest(problem, asked.costs)
        self.bound: Bound = lower_bound(self._cheapest, by_span=asked.by_span)
        """The largest lower bound so far: the exact method may raise it."""
        self.solver_bound_s: float | None = None
        self._best_s, self._seconds_before, self._least_bound_s = math.inf, 0.0, 0.0
        self._families: list[Candidate] = []
        self._searched: list[Candidate] = []
        self._last_resort: list[Candidate] = []

    def run(self, chosen: SearchResult | None, seconds_before: float, least_bound_s: float) -> list[SearchResult]:
        """Return the best order that fits, or nothing where none was found. Raises: KeyboardInterrupt, before any.

        Progress is that of all placements: `chosen` is the best result of those before, `seconds_before` what these
        took, and `least_bound_s` the least bound of all.
        """
        self._least_bound_s = least_bound_s
        if chosen is not None:
            self._best_s, self._seconds_before = chosen.objective_s, seconds_before
        self._budget.begin()
        results = self._run_from(self._start)
        return results if results or not self._is_last_split else self._run_from(self._start_again)

    def _run_from(self, start: Callable[[], list[Candidate]]) -> list[SearchResult]:
        was_interrupted = False
        try:
            self._improve(start())
            if self._has_exact_method:
                self._solve()
        except KeyboardInterrupt:
            was_interrupted = True
        return self._end(was_interrupted=was_interrupted)

    @property
    def _goal_s(self) -> float:
        """The seconds of an order that no other one can beat."""
        return self.bound.seconds * (1 + OPTIMAL_GAP)

    @property
    def _has_exact_method(self) -> bool:
        """Whether the exact method gets a share of the time."""
        is_small = self.problem.num_actions <= MOST_ACTIONS
        return is_small and not self._budget.counts_evaluations and is_installed()

    def _start(self) -> list[Candidate]:
        self._families = list(of_families(self.problem, by_span=self.asked.by_span))
        self._budget.spent += len(self._families)
        starts = starts_of(self.problem, self._families, self.asked, self._budget)
        self._searched += [start for start in starts if start.method != "family"]
        return starts

    def _start_again(self) -> list[Candidate]:
        """Return the last resort; what was searched before it is left out, because all of it breaks the limit."""
        self._last_resort = last_resort(self.problem, self.asked)
        self._searched = list(self._last_resort)
        return self._last_resort

    def _improve(self, candidates: list[Candidate]) -> None:
        share = SHARE_BEFORE_SOLVING if self._has_exact_method else 1.0
        improvement = Improvement(self.asked, self._budget, self._goal_s, share, self._report)
        try:
            improvement.run(candidates)
        finally:  # an interrupt too leaves what was found
            self._searched += improvement.found

    def _report(self, candidate_s: float) -> None:
        self._best_s = min(self._best_s, candidate_s)
        if self._progress is not None:
            seconds = self._seconds_before + self._budget.elapsed_s
            self._progress(Progress(seconds, self._best_s, self._least_bound_s))

    def _solve(self) -> None:
        """Let the exact method raise the bound, and find what is shorter, in the time that is left."""
        by_span = self.asked.by_span
        fitting = [candidate for candidate in [*self._searched, *self._families] if candidate.fits]
        start = min(fitting, key=by_objective, default=None)
        if start is None or self._budget.is_over or start.objective_s <= self._goal_s:
            return
        options: dict[str, Any] = {"by_span": by_span, "seconds": self._budget.left_s, "seed": self.asked.seed}
        solved = solve(self._cheapest, start.sequence, **options)
        self.solver_bound_s = solved.bound_s
        if self.bound.seconds < solved.bound_s < math.inf:
            self.bound = Bound("exact", None, {"proved by CP-SAT": solved.bound_s})
        if solved.sequence is not None:
            self._searched.append(Candidate.of(self.problem, solved.sequence, "exact", by_span=by_span))
        if solved.was_interrupted:
            raise KeyboardInterrupt

    def _end(self, *, was_interrupted: bool) -> list[SearchResult]:
        asked, by_span = self.asked, self.asked.by_span
        best_few = different(sorted(self._searched, key=by_objective))[:NUM_ENDED]
        candidates = [*best_few, *self._last_resort, *self._families]
        plans = planned(candidates, asked.costs, asked.memory_limit, by_span=by_span)
        if not plans and was_interrupted:
            raise KeyboardInterrupt
        if not plans:
            return []
        best, noise = shortest(plans), None
        if asked.noise_shares is not None:
            best, noise = steadiest(plans, asked.noise_shares, asked.seed, by_span=by_span)
        return [
            SearchResult(
                plan=best.plan,
                costs=asked.costs,
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
    few = Problem.of(Placement.line(1), 1, Costs.uniform())
    sequence = list_schedule(few, next(settings_for(few)))
    assert sequence is not None
    Moves(few, 0).improve(sequence, sequence, math.inf, 1, 0.0)
