"""The result: the gap of its objective, and what it says about memory."""

import pytest

from penstock.planning import plan
from penstock.schedules import build
from penstock.searching.bounds import Bound
from penstock.searching.result import Progress, SearchResult, gap_of
from penstock.simulation import Costs

COSTS = Costs.uniform(activation_bytes=10, parameter_bytes=7, transfer=0.5)
PLAN = plan(build("gpipe", ranks=2, microbatches=3), COSTS)


def result_of(objective, bound_s):
    return SearchResult(PLAN, COSTS, Bound("work", 0, {"work": bound_s}), "family", objective, 1.0, 10)


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_the_gap_is_that_of_the_objective(objective):
    seconds = PLAN.timeline.makespan_s if objective == "makespan" else PLAN.timeline.span_s

    assert result_of(objective, 10.0).gap == pytest.approx(seconds / 10.0 - 1)
    assert not result_of(objective, 10.0).is_optimal
    assert result_of(objective, seconds).is_optimal


def test_rounding_is_no_gap():
    assert gap_of(1.0 + 1e-13, 1.0) == 0.0
    assert gap_of(1.0 + 1e-11, 1.0) > 0.0
    assert gap_of(1.0, 0.0) == 0.0
    assert Progress(1.0, 3.0, 2.0).gap == 0.5


def test_peaks_have_what_is_always_there():
    found = result_of("makespan", 1.0)

    assert found.peak_bytes == [3 * 10 + 7] * 2
    assert found.schedule.name == "gpipe"
    assert found.makespan_s == PLAN.timeline.makespan_s
