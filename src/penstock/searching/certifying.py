"""The last look at a result, by code that the search did not use: nothing that is known may contradict it.

The result is planned anew with the costs that were given, as `compare` does. Its bound may not lie above it, and no
registered family of the placements that fits the limit may be shorter. Each of these would be a bug of Penstock.
"""

from collections.abc import Mapping
from typing import Any

from penstock.ir.schedule import Schedule
from penstock.placement import Placement
from penstock.proofs import Limit
from penstock.searching.candidates import families_of
from penstock.searching.comparison import Refusal, compare
from penstock.searching.result import OPTIMAL_GAP, SearchResult
from penstock.simulation.costs.costs import Costs
from penstock.simulation.costs.layer_costs import LayerCosts


def certify(
    result: SearchResult, costs: Mapping[Placement, Costs | LayerCosts], memory_limit: Any, *, per_action: bool
) -> None:
    """Raise an AssertionError where the result of a search cannot be right; the arguments are those of the search.

    The result must fit the memory limit, take as long when it is predicted again, lie above its lower bound, and be no
    longer than any family of schedules that fits. `costs` are by placement: those per layer may have another split on
    each placement. `per_action` says that costs are of single actions, and not of all that a rank does for a
    microbatch.
    """
    limit = None if memory_limit is None else Limit.read(memory_limit)

    def predict_s(schedule: Schedule) -> float | None:
        """Return the seconds of a schedule, or None where it does not fit, or its family has no such costs."""
        row = compare(schedule.name, lambda: schedule, costs[schedule.placement], per_action=per_action)
        if isinstance(row, Refusal) or not (limit is None or row.fits(limit)):
            return None
        return row.makespan_s if result.objective == "makespan" else row.span_s

    # The result itself: `predicted_s` is None where it does not fit.
    result_s, bound_s = result.objective_s, result.lower_bound_s
    predicted_s = predict_s(result.schedule)
    _require(predicted_s is not None, f"the result of the search does not fit {limit}, or is refused")
    _require(predicted_s == result_s, f"the search found {result_s} s, and its result takes {predicted_s} s")
    bound_text = f"the bound, {bound_s} s, lies above the result, {result_s} s"
    _require(bound_s <= result_s * (1 + OPTIMAL_GAP), bound_text)
    if result.was_interrupted or result.noise is not None:
        return  # families may be left out by then; or the mean chose the result, so without noise one may be shorter
    for family in families_of(costs, result.schedule.num_microbatches):
        family_s = predict_s(family)
        is_shorter = family_s is not None and family_s * (1 + OPTIMAL_GAP) < result_s
        _require(not is_shorter, f"the search found {result_s} s, and {family.name}, which fits, takes {family_s} s")


def _require(is_right: bool, problem: str) -> None:
    # An assert statement would let a wrong result pass under `python -O`.
    if not is_right:
        raise AssertionError(problem)
