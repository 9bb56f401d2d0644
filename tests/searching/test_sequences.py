"""A sequence comes to what the simulator and the model of memory say of its schedule."""

import numpy as np
import pytest

from penstock.ir.live import peak_bytes
from penstock.ir.split_backwards import with_split_backwards
from penstock.placement import Placement
from penstock.schedules import build
from penstock.searching.sequences import run, sequence_of
from penstock.simulation import Costs, simulate
from tests.searching.cases import problem_of, random_costs

FAMILIES = {"1f1b": {}, "zb-h1": {}, "zbv": {}, "interleaved-1f1b": {"stages_per_rank": 2}, "v-min": {}, "gpipe": {}}


@pytest.mark.parametrize(
    "others",
    [
        {"is_exclusive": True},
        {"launch_s": 0.05, "microbatch_compute_factor": (1.0, 2.0) * 4},
        {"microbatch_bytes_factor": (2.0,) * 8},
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_times_and_bytes_are_those_of_the_schedule(family, others):
    schedule = build(family, ranks=4, microbatches=8, **FAMILIES[family])
    costs = random_costs(1, schedule.num_stages, **others)
    problem = problem_of(schedule.placement, 8, costs)

    sequence = sequence_of(schedule)
    found = run(problem, sequence)

    split = with_split_backwards(schedule)
    timeline = simulate(split, costs)
    assert found.makespan_s == pytest.approx(timeline.makespan_s, rel=1e-12)
    assert found.span_s == pytest.approx(timeline.span_s, rel=1e-12)
    assert found.peak_bytes.tolist() == peak_bytes(split, costs.stage_bytes(schedule.placement, 8))
    assert np.array_equal(problem.schedule(sequence, "again").op, split.op)
    assert np.array_equal(problem.schedule(sequence, "again").microbatch, split.microbatch)


def test_every_action_is_behind_what_it_waits_for():
    problem = problem_of(Placement.vee(3), 5, Costs.uniform())

    sequence = sequence_of(build("zbv", ranks=3, microbatches=5))

    place = np.argsort(sequence)
    assert sorted(sequence) == list(range(problem.num_actions))
    for waits in (problem.source, problem.activation_source):
        has = np.flatnonzero(waits >= 0)
        assert (place[waits[has]] < place[has]).all()
