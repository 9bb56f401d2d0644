"""The last look at a result, by code that the search did not use: nothing that is known may contradict it.

The result is planned anew with the costs that were given, as `compare` does. Its bound may not lie above it, and no
registered family of the placements that fits the limit may be shorter. Each of these would be a bug of Penstock.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from penstock.errors import ConfigError
from penstock.ir.schedule import Schedule
from penstock.placement import Placement
from penstock.proofs import Limit
from penstock.schedules import FAMILIES, build
from penstock.searching.comparison import Refusal, compare
from penstock.searching.result import OPTIMAL_GAP, SearchResult
from penstock.simulation.costs.costs import Costs
from penstock.simulation.costs.layer_costs import LayerCosts


def certify(
    result: SearchResult,
    costs_of_placement: Mapping[Placement, Costs | LayerCosts],
    memory_limit: Any,
    *,
    per_action: bool,
) -> None:
    """Raise an AssertionError where the result of a search with these arguments cannot be right.

    Costs per layer may have another split on each placement.
    """
    limit = None if memory_limit is None else Limit.read(memory_limit)

    def predict_s(schedule: Schedule) -> float | None:
        """Return what a schedule takes, or None where it does not fit, or its family has no such costs."""
        costs = costs_of_placement[schedule.placement]
        row = compare(schedule.name, lambda: schedule, costs, per_action=per_action)
        if isinstance(row, Refusal) or not (limit is None or row.fits(limit)):
            return None
        return row.makespan_s if result.objective == "makespan" else row.span_s

    found_s, bound_s = result.objective_s, result.lower_bound_s
    again_s = predict_s(result.schedule)
    assert again_s is not None, f"the result of the search does not fit {limit}, or is refused"
    assert again_s == found_s, f"the search found {found_s} s, and its result takes {again_s} s"
    assert bound_s <= found_s * (1 + OPTIMAL_GAP), f"the bound, {bound_s} s, lies above the result, {found_s} s"
    if result.was_interrupted or result.noise is not None:
        return  # families may be left out by then; or it was chosen by its mean, so without noise one may be shorter
    for family in families_of(costs_of_placement, result.schedule.num_microbatches):
        family_s = predict_s(family)
        is_shorter = family_s is not None and family_s * (1 + OPTIMAL_GAP) < found_s
        assert not is_shorter, f"the search found {found_s} s, and {family.name}, which fits, takes {family_s} s"


def families_of(placements: Collection[Placement], num_microbatches: int) -> Iterator[Schedule]:
    """Yield the schedules of all families, with their own defaults, that train on one of the placements."""
    for num_ranks, num_stages in {(placement.num_ranks, placement.num_stages) for placement in placements}:
        for name in FAMILIES:
            try:
                schedule = build(name, ranks=num_ranks, microbatches=num_microbatches, stages=num_stages)
            except ConfigError:
                continue
            if schedule.placement in placements and not schedule.is_forward_only:
                yield schedule
