"""`SearchResult`: the result of a search, and how far the search was."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from penstock.ir.operations import Kind
from penstock.ir.schedule import Schedule
from penstock.ir.timeline import Timeline
from penstock.placement import Placement
from penstock.planning import Plan
from penstock.searching.bounds import Bound
from penstock.searching.candidates import Method
from penstock.searching.noise import NoiseEffect
from penstock.simulation.costs.costs import Costs

Objective = Literal["makespan", "span"]
OPTIMAL_GAP = 1e-9
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a search is."""

    seconds: float
    best_s: float
    """The objective of the best candidate so far, before its messages are known."""
    bound_s: float

    @property
    def gap(self) -> float:
        return gap_of(self.best_s, self.bound_s)


@dataclass(frozen=True, slots=True, eq=False)
class SearchResult:
    """The result of a search."""

    plan: Plan
    """The plan of the schedule, proved under the limit."""
    costs: Costs
    """The costs of one action of each stage of its placement, with which it was simulated."""
    bound: Bound
    """The largest lower bound, and its terms."""
    method: Method
    """Where the schedule comes from."""
    objective: Objective
    seconds: float
    """The seconds that the search took."""
    evaluations: int
    """How many sequences were timed."""
    noise: NoiseEffect | None = None
    """The effect of noise in the costs on it and on the best family, where a search allows for noise."""
    solver_bound_s: float | None = None
    """The exact method's own bound; None where it did not run for every placement."""
    was_interrupted: bool = False
    """Whether Ctrl-C ended it before its time."""
    split: tuple[int, ...] = ()
    """The layers of each stage, where a joint search chose them or the usual split left no order within the limit."""

    @property
    def schedule(self) -> Schedule:
        return self.plan.schedule

    @property
    def placement(self) -> Placement:
        return self.plan.schedule.placement

    @property
    def recomputed_stages(self) -> tuple[int, ...]:
        """The stages whose forwards run again before their I."""
        schedule = self.schedule
        return tuple(np.unique(schedule.stage[schedule.op == Kind.RECOMPUTE]).tolist())

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
    def objective_s(self) -> float:
        """The seconds that the search made short."""
        return self.makespan_s if self.objective == "makespan" else self.span_s

    @property
    def chosen_by_s(self) -> float:
        """The seconds by which the search chose it: where it allows for noise, those on average."""
        return self.noise.mean_s if self.noise else self.objective_s

    @property
    def held(self) -> int:
        """The most that a rank holds: bytes, or activations where costs know no bytes."""
        return max(self.peak_bytes) or max(self.timeline.peak_activations)

    @property
    def lower_bound_s(self) -> float:
        """The seconds of the objective that no order of the placements that were asked for can go below."""
        return self.bound.seconds

    @property
    def gap(self) -> float:
        """The share of the bound by which the result is above it."""
        return gap_of(self.objective_s, self.lower_bound_s)

    @property
    def is_optimal(self) -> bool:
        """Whether the bound is reached, but for rounding."""
        return self.gap <= OPTIMAL_GAP

    @property
    def peak_bytes(self) -> list[int]:
        """The most bytes that each rank holds, with what is always there."""
        pairs = zip(self.timeline.peak_bytes, self.timeline.static_bytes, strict=True)
        return [peak + static for peak, static in pairs]


def best_result(results: Sequence[SearchResult]) -> SearchResult:
    """Return the shortest of at least one result, of equally short ones the one that holds least."""
    shortest_s = min(result.chosen_by_s for result in results) * (1 + OPTIMAL_GAP)
    return min((result for result in results if result.chosen_by_s <= shortest_s), key=lambda result: result.held)


def gap_of(objective_s: float, bound_s: float) -> float:
    """Return by how much an objective is above a bound, as a share of the bound."""
    gap = objective_s / bound_s - 1 if bound_s else 0.0
    return 0.0 if abs(gap) < ROUNDING else gap
