"""The end of a search: its best candidates become plans, and one of them is the result.

Candidates are lowered, proved under the limit and simulated with their messages. The shortest is chosen, of equally
short ones the one that holds least; or the one that is shortest on average over perturbed costs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError
from penstock.placement import Placement
from penstock.planning import Plan, plan
from penstock.searching.candidates import Candidate
from penstock.searching.noise import NoiseEffect, mean_s, perturbed
from penstock.searching.problem import Problem
from penstock.searching.result import OPTIMAL_GAP
from penstock.simulation.costs.costs import Costs


@dataclass(frozen=True, slots=True, eq=False)
class Finalist:
    """A candidate with its plan, proved under the limit."""

    candidate: Candidate
    plan: Plan
    objective_s: float
    """The makespan or the span of the plan, with its messages."""

    @property
    def peak(self) -> int:
        """The most that a rank holds: bytes, or activations where costs know no bytes."""
        return max(self.plan.timeline.peak_bytes) or max(self.plan.timeline.peak_activations)


def finalists_of(candidates: Iterable[Candidate], costs: Costs, memory_limit: Any, *, by_span: bool) -> list[Finalist]:
    """Lower, prove and simulate candidates; leave out what breaks the limit, maybe by its messages."""
    finalists = []
    for candidate in candidates:
        try:
            proved = plan(candidate.schedule(), costs, memory_limit=memory_limit)
        except ScheduleError:
            continue
        objective_s = proved.timeline.span_s if by_span else proved.timeline.makespan_s
        finalists.append(Finalist(candidate, proved, objective_s))
    return finalists


def shortest(finalists: Sequence[Finalist]) -> Finalist:
    """Return the shortest finalist, of equally short ones the one that holds least."""
    shortest_s = min(finalist.objective_s for finalist in finalists) * (1 + OPTIMAL_GAP)
    return min((finalist for finalist in finalists if finalist.objective_s <= shortest_s), key=lambda best: best.peak)


def steadiest(
    finalists: Sequence[Finalist], shares: NDArray[np.float64], seed: int, *, by_span: bool
) -> tuple[Finalist, NoiseEffect]:
    """Return the finalist that is shortest on average over perturbed costs, and what noise does."""
    perturbed_problems: dict[Placement, list[Problem]] = {}
    means_s = []
    for finalist in finalists:
        problem, sequence = finalist.candidate.problem, finalist.candidate.sequence
        if problem.placement not in perturbed_problems:
            perturbed_problems[problem.placement] = perturbed(problem, shares, seed)
        noisy_s = mean_s(perturbed_problems[problem.placement], sequence, by_span=by_span)
        means_s.append(finalist.objective_s * (noisy_s / mean_s([problem], sequence, by_span=by_span)))
    best = int(np.argmin(means_s))
    families = [index for index, finalist in enumerate(finalists) if finalist.candidate.method == "family"]
    family = min(families, key=lambda index: finalists[index].objective_s, default=None)
    if family is None:
        return finalists[best], NoiseEffect(means_s[best], "", 0.0, 0.0)
    name = finalists[family].plan.schedule.name
    return finalists[best], NoiseEffect(means_s[best], name, finalists[family].objective_s, means_s[family])
