"""A sequence comes to what the simulator and the model of memory say of its schedule."""

import numpy as np
import pytest

from penstock.ir.live import peak_bytes
from penstock.ir.split_backwards import with_split_backwards
from penstock.placement import Placement
from penstock.schedules import build
from penstock.searching.sequences import in_order, run, sequence_of
from penstock.simulation import Costs, simulate
from tests.searching.cases import problem_of, random_costs

FAMILIES = {"1f1b": {}, "zb-h1": {}, "zbv": {}, "interleaved-1f1b": {"stages_per_rank": 2}, "v-min": {}, "gpipe": {}}


@pytest.mark.parametrize(
    "others", [{}, {"is_exclusive": True}, {"launch_s": 0.05}, {"microbatch_bytes_factor": (2.0,) * 8}]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_times_and_bytes_are_those_of_the_schedule(family, others):
    schedule = build(family, ranks=4, microbatches=8, **FAMILIES[family])
    costs = random_costs(1, schedule.num_stages, **others)
    problem = problem_of(schedule.placement, 8, costs)

    sequence = sequence_of(problem, schedule, costs)
    found = run(problem, sequence)

    split = with_split_backwards(schedule)
    timeline = simulate(split, costs)
    assert found.makespan_s == pytest.approx(timeline.makespan_s, rel=1e-12)
    assert found.span_s == pytest.approx(timeline.span_s, rel=1e-12)
    assert found.peak.tolist() == peak_bytes(split, costs.stage_bytes(schedule.placement, 8))
    assert np.array_equal(problem.schedule(sequence, "again").op, split.op)
    assert np.array_equal(problem.schedule(sequence, "again").microbatch, split.microbatch)


def test_what_is_above_a_limit_does_not_fit():
    schedule = build("gpipe", ranks=2, microbatches=4)
    costs = Costs.uniform(activation_bytes=10)

    for limit, fits in ((40, True), (39, False)):
        problem = problem_of(schedule.placement, 4, costs, limit)
        assert run(problem, sequence_of(problem, schedule, costs)).fits(problem) is fits


def test_actions_come_behind_what_they_wait_for():
    problem = problem_of(Placement.line(2), 1, Costs.uniform())

    assert in_order(problem, np.array([1, 0, 3, 2, 5, 4], np.int32)).tolist() == [0, 1, 3, 2, 5, 4]


def test_orders_that_wait_for_each_other_are_refused():
    problem = problem_of(Placement.line(2), 1, Costs.uniform())

    with pytest.raises(ValueError, match="wait for each other"):
        in_order(problem, np.array([2, 0, 1, 3, 4, 5], np.int32))  # rank 0 begins with its I
