"""Split, placement, recomputation and order of a layout searched together, and planned with its gathers.

The search knows no gathers: it sees what a rank holds of them as bytes that are always there. Where the plan then holds
more than a rank may, the search runs again within a limit that is lower by so much.
"""

from penstock.errors import ConfigError, ScheduleError
from penstock.searching.joint.search_joint import search_joint
from penstock.searching.layouts.planned import PlannedLayout, planned
from penstock.searching.layouts.problem import LayoutProblem
from penstock.searching.result import SearchResult

NUM_TRIES = 2


def search_layout(problem: LayoutProblem, plan: PlannedLayout, seconds: float) -> PlannedLayout:
    """Return a plan of a layout that takes no longer than a given one, searched for so many seconds."""
    if problem.layout.pipeline == 1 or not (problem.costs.backward_input and problem.costs.backward_weight):
        return plan
    limit_bytes = problem.limit_bytes
    for tries_left in range(NUM_TRIES, 0, -1):
        candidate = _searched_within(problem, limit_bytes, seconds / (NUM_TRIES if tries_left > 1 else 1))
        if candidate is None or candidate.peak_bytes <= problem.limit_bytes:
            break
        limit_bytes -= candidate.peak_bytes - problem.limit_bytes
    fits = candidate is not None and candidate.peak_bytes <= problem.limit_bytes
    return candidate if candidate is not None and fits and candidate.step_s < plan.step_s else plan


def _searched_within(problem: LayoutProblem, limit_bytes: int, seconds: float) -> PlannedLayout | None:
    """Return the plan of what a search finds within a limit; None where nothing fits."""
    try:
        result = search_joint(
            problem.resident_costs,
            problem.layout.pipeline,
            problem.layout.microbatches,
            memory_limit=limit_bytes,
            seconds=seconds,
        )
        return _planned(problem, result)
    except (ConfigError, ScheduleError):
        return None


def _planned(problem: LayoutProblem, result: SearchResult) -> PlannedLayout:
    is_family = result.method == "family"
    family = result.schedule.name if is_family else ""
    return planned(problem, result.schedule, result.split, family)
