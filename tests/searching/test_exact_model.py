"""The constraints of the exact method: what waits for what, microbatches that are alike, and sequences from starts."""

import numpy as np
import pytest

from penstock.placement import Placement
from penstock.schedules import build
from penstock.searching.exact_model import Model, groups_alike
from penstock.searching.sequences import run, sequence_of
from penstock.searching.ticks import Ticks
from penstock.simulation import Costs
from tests.searching.cases import problem_of, random_costs

cp_model = pytest.importorskip("ortools.sat.python.cp_model")
SIZES = {"activation_bytes": 10, "weight_context_bytes": 6}


@pytest.mark.parametrize(
    ("others", "groups"),
    [
        ({}, [[0, 1, 2, 3]]),
        ({"microbatch_compute_factor": (1.0, 2.0, 1.0, 2.0)}, [[0, 2], [1, 3]]),
        ({"microbatch_bytes_factor": (1.0, 1.0, 1.0, 2.0)}, [[0, 1, 2], [3]]),
        ({"microbatch_compute_factor": (1.0, 2.0, 3.0, 4.0)}, [[0], [1], [2], [3]]),
    ],
)
def test_microbatches_are_alike_that_take_the_same_seconds_and_bytes(others, groups):
    assert groups_alike(problem_of(Placement.line(2), 4, Costs.uniform(**SIZES, **others))) == groups


@pytest.mark.parametrize("by_span", [False, True], ids=["makespan", "span"])
@pytest.mark.parametrize("family", ["1f1b", "zb-h1", "zbv"])
def test_a_hint_is_a_whole_solution_whatever_the_numbers_of_its_microbatches(family, by_span):
    schedule = build(family, ranks=4, microbatches=8)
    problem = Ticks.of(problem_of(schedule.placement, 8, random_costs(0, schedule.num_stages, **SIZES), 80)).problem
    start = sequence_of(schedule)
    rest, microbatch = np.divmod(start, 8)
    shuffled = (rest * 8 + np.random.default_rng(0).permutation(8)[microbatch]).astype(np.int32)
    model = Model(problem, 2**40, by_span=by_span)

    model.hint(shuffled)

    solver = cp_model.CpSolver()
    solver.parameters.fix_variables_to_their_hinted_value = True
    solver.parameters.catch_sigint_signal = False  # else Ctrl-C ends Python from now on
    assert solver.solve(model.constraints) == cp_model.OPTIMAL
    found = run(problem, start)
    assert solver.objective_value == (found.span_s if by_span else found.makespan_s)
    assert run(problem, model.sequence(solver)).makespan_s == found.makespan_s
