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
class Planned:
    """A candidate with its plan."""

    candidate: Candidate
    plan: Plan
    objective_s: float
    """With its messages."""

    @property
    def held(self) -> int:
        """The most that a rank holds: bytes, or activations where costs know no bytes."""
        return max(self.plan.timeline.peak_bytes) or max(self.plan.timeline.peak_activations)


def planned(candidates: Iterable[Candidate], costs: Costs, memory_limit: Any, *, by_span: bool) -> list[Planned]:
    """Lower, prove and simulate candidates; leave out what breaks the limit, maybe by its messages."""
    found = []
    for candidate in candidates:
        try:
            own = plan(candidate.schedule(), costs, memory_limit=memory_limit)
        except ScheduleError:
            continue
        found.append(Planned(candidate, own, own.timeline.span_s if by_span else own.timeline.makespan_s))
    return found


def shortest(found: Sequence[Planned]) -> Planned:
    """Return the shortest, of equally short ones the one that holds least."""
    shortest_s = min(each.objective_s for each in found) * (1 + OPTIMAL_GAP)
    return min((each for each in found if each.objective_s <= shortest_s), key=lambda each: each.held)


def steadiest(
    found: Sequence[Planned], shares: NDArray[np.float64], seed: int, *, by_span: bool
) -> tuple[Planned, NoiseEffect]:
    """Return the one that is shortest on average over perturbed costs, and what noise does."""
    problems: dict[Placement, list[Problem]] = {}
    means = []
    for each in found:
        own, sequence = each.candidate.problem, each.candidate.sequence
        if own.placement not in problems:
            problems[own.placement] = perturbed(own, shares, seed)
        longer = mean_s(problems[own.placement], sequence, by_span=by_span) / mean_s([own], sequence, by_span=by_span)
        means.append(each.objective_s * longer)
    best = int(np.argmin(means))
    families = [index for index, each in enumerate(found) if each.candidate.method == "family"]
    family = min(families, key=lambda index: found[index].objective_s, default=None)
    if family is None:
        return found[best], NoiseEffect(means[best], "", 0.0, 0.0)
    name = found[family].plan.schedule.name
    return found[best], NoiseEffect(means[best], name, found[family].objective_s, means[family])
