"""Lower bounds: seconds that no order of a problem can go below; the largest is the certificate of a search.

Each function gives one bound per rank. Those of `SPAN` hold for the span, the longest of a rank from its first start to
its last end; a step takes at least as long, and the bounds of `MAKESPAN` hold for it besides.
"""

from penstock.searching.bounds.bound import Bound, Route
from penstock.searching.bounds.busiest import of_begin_and_work, of_inputs_and_end, of_slowest_microbatch, of_work
from penstock.searching.bounds.fill_and_drain import of_begin_fill_and_drain, of_fill_and_drain, of_fill_and_end
from penstock.searching.problem import Problem

SPAN = (of_work, of_inputs_and_end, of_slowest_microbatch, of_fill_and_drain, of_fill_and_end)
MAKESPAN = (*SPAN, of_begin_and_work, of_begin_fill_and_drain)


def lower_bound(problem: Problem, *, by_span: bool = False) -> Bound:
    """Return the largest bound of the makespan, or of the span."""
    route = Route(problem)
    bounds = [bound for of_ranks in (SPAN if by_span else MAKESPAN) for bound in of_ranks(route)]
    return max(bounds, key=lambda bound: bound.seconds)


__all__ = ["MAKESPAN", "SPAN", "Bound", "Route", "lower_bound"]
