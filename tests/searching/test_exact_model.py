"""The constraints of the exact method: what waits for what, microbatches that are alike, and sequences from starts."""

import numpy as np
import pytest

from penstock.placement import Placement
from penstock.schedules import build
from penstock.searching.exact_model import Model, groups_alike, transitive_closure, waits_of
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


def test_an_action_waits_for_its_source_what_it_saved_and_the_microbatch_before_it_that_is_alike():
    costs = Costs.uniform(microbatch_compute_factor=(1.0, 2.0, 1.0))
    problem = problem_of(Placement.line(1), 3, costs)

    waits = waits_of(problem, groups_alike(problem))

    # F are 0 to 2, I 3 to 5, W 6 to 8; microbatches 0 and 2 are alike.
    of_microbatches = {(0, 3), (3, 6), (1, 4), (4, 7), (2, 5), (5, 8)}
    assert {tuple(pair) for pair in np.argwhere(waits).tolist()} == of_microbatches | {(0, 2), (3, 5), (6, 8)}
    assert np.flatnonzero(transitive_closure(waits)[0]).tolist() == [2, 3, 5, 6, 8]


def test_a_literal_is_made_only_where_waits_leave_the_order_open():
    model = Model(problem_of(Placement.line(2), 3, Costs.uniform(**SIZES), 20), 100, by_span=False)

    on_rank_0 = {(one, other) for one, other in model.literals if model.problem.rank[one] == 0}
    # F2 may come before or behind I and W of microbatches 0 and 1, F1 before or behind those of microbatch 0.
    pairs = {(2, 6), (2, 7), (2, 12), (2, 13), (1, 6), (1, 12)}
    assert on_rank_0 == pairs | {(other, one) for one, other in pairs}


def test_of_actions_that_start_together_those_without_seconds_come_first():
    costs = Costs.uniform(forward=1, backward_input=0, backward_weight=0, activation_bytes=10)
    problem = problem_of(Placement.line(1), 2, costs, 10)
    model = Model(problem, 10, by_span=False)
    starts = {0: 0, 1: 1, 2: 1, 3: 2, 4: 1, 5: 2}  # F0, F1, I0, I1, W0, W1

    sequence = model.sequence_at([starts[action] for action in range(6)])

    assert sequence.tolist() == [0, 2, 4, 1, 3, 5]
    assert run(problem, sequence).fits(problem)


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
