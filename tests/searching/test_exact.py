"""The exact method against optima that another solver has proved, and against every order of small problems."""

import math
import os
import signal
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from penstock.placement import Placement
from penstock.schedules import build
from penstock.searching.bounds import lower_bound
from penstock.searching.exact import is_installed, solve
from penstock.searching.exact_model import Model
from penstock.searching.sequences import run, sequence_of
from penstock.simulation import Costs
from tests.searching.cases import problem_of, random_costs, rows
from tests.searching.exhaustive import optimum

cp_model = pytest.importorskip("ortools.sat.python.cp_model")
LONG_S = 60.0
UNEVEN = Costs(
    forward_s=(1.0, 3.0),
    backward_input_s=(2.0, 1.0),
    backward_weight_s=(1.0, 2.0),
    latency_s=1.0,
    activation_bytes=10,
    weight_context_bytes=6,
)
THREE = Costs(forward_s=(2.0, 1.0, 3.0), backward_input_s=(1.0, 3.0, 2.0), backward_weight_s=(2.0, 1.0, 1.0))
FOUR = Costs(forward_s=(1.0, 2.0, 1.0, 2.0), backward_input_s=(2.0,), backward_weight_s=(1.0, 2.0, 2.0, 1.0))
LINKS = {"is_exclusive": True, "message_bytes": 2, "bandwidth_bytes_per_s": 1.0, "latency_s": 0.0}


def objective_s(problem, sequence, by_span):
    found = run(problem, sequence)
    assert found.fits(problem)
    return found.span_s if by_span else found.makespan_s


by_objective = pytest.mark.parametrize("by_span", [False, True], ids=["makespan", "span"])


@by_objective
@pytest.mark.parametrize("row", rows("certified_optima.json"), ids=lambda row: "-".join(map(str, row.values())))
def test_optima_that_another_solver_has_proved_are_proved(row, by_span):
    costs = Costs.uniform(activation_bytes=2, weight_context_bytes=1)
    problem = problem_of(Placement.line(row["ranks"]), row["microbatches"], costs, round(2 * row["cap_microbatches"]))

    found = solve(problem, None, by_span=by_span, seconds=LONG_S)

    assert found.is_proved
    assert found.bound_s == row["span" if by_span else "makespan"]
    assert objective_s(problem, found.sequence, by_span) == found.bound_s


SMALL = {
    "line": (Placement.line(2), 2, UNEVEN, None),
    "limit": (Placement.line(2), 3, UNEVEN, 20),
    "one at a time": (Placement.line(2), 3, UNEVEN, 10),
    "nothing fits": (Placement.line(2), 3, UNEVEN, 9),
    "I leaves more than it frees": (Placement.line(2), 3, replace(UNEVEN, weight_context_bytes=14), 24),
    "links": (Placement.line(2), 3, replace(UNEVEN, **LINKS), 26),
    "launches": (Placement.line(2), 3, replace(UNEVEN, launch_s=1.0), 20),
    "three ranks": (Placement.line(3), 2, THREE, None),
    "V": (Placement.vee(2), 2, replace(FOUR, activation_bytes=10), 30),
    "links of a V": (Placement.vee(2), 2, replace(FOUR, **LINKS), None),
    "loop": (Placement.loop(2, 4), 2, replace(FOUR, activation_bytes=10), 30),
    "differ": (Placement.line(2), 3, replace(UNEVEN, microbatch_compute_factor=(1.0, 3.0, 2.0)), 20),
    "two alike": (Placement.line(2), 3, replace(UNEVEN, microbatch_compute_factor=(2.0, 1.0, 2.0)), 20),
    "bytes differ": (Placement.line(2), 3, replace(UNEVEN, microbatch_bytes_factor=(1.0, 1.5, 0.5), **LINKS), 20),
}


@by_objective
@pytest.mark.parametrize(("placement", "microbatches", "costs", "limit"), SMALL.values(), ids=SMALL)
def test_the_optimum_is_the_least_of_all_orders(placement, microbatches, costs, limit, by_span):
    problem = problem_of(placement, microbatches, costs, limit)

    found = solve(problem, None, by_span=by_span, seconds=LONG_S)

    assert found.is_proved
    assert found.bound_s == optimum(problem, by_span=by_span)
    if found.bound_s < math.inf:
        assert objective_s(problem, found.sequence, by_span) == found.bound_s
    else:
        assert found.sequence is None


def test_a_bound_of_the_span_lets_ranks_begin_later_than_orders_do():
    """With microbatch 1 first, rank 1 would begin later and wait less; how much later, the solver leaves open."""
    costs = Costs(forward_s=(3.0, 1.0, 1.0), backward_input_s=(1.0,), backward_weight_s=(1.0, 20.0, 1.0), latency_s=1.0)
    problem = problem_of(Placement.line(3), 4, costs)

    found = solve(problem, None, by_span=True, seconds=LONG_S)

    assert objective_s(problem, found.sequence, by_span=True) == 91.0  # the least if all begin with one microbatch
    assert found.bound_s == 89.0
    assert not found.is_proved
    assert lower_bound(problem, by_span=True).seconds <= found.bound_s


def random_problems(seed):
    random = np.random.default_rng(seed)
    for number in range(10):
        ranks, microbatches = int(random.integers(2, 4)), int(random.integers(2, 5))
        placement = Placement.line(ranks) if number % 3 else Placement.vee(2)
        others = {"microbatch_compute_factor": random.integers(1, 3, microbatches)} if number % 4 == 0 else {}
        costs = random_costs(seed * 10 + number, placement.num_stages, is_exclusive=number % 5 == 0, **others)
        limit = int(10 * len(placement.stages_of_rank[0]) * random.uniform(1.3, 3.5))
        yield problem_of(placement, microbatches, costs, limit)


@pytest.mark.parametrize("seed", range(10))
def test_no_bound_is_above_the_optima_of_random_problems(seed):
    for number, problem in enumerate(random_problems(seed)):
        by_span = number % 2 == 0

        found = solve(problem, None, by_span=by_span, seconds=LONG_S)

        assert found.is_proved
        found_s = objective_s(problem, found.sequence, by_span)
        for bound in (found.bound_s, lower_bound(problem, by_span=by_span).seconds):
            assert bound <= found_s * (1 + 1e-12)
        assert found_s <= found.bound_s * (1 + 1e-9)  # which is cut off to ticks


@pytest.mark.parametrize(("seed", "number"), [(4, 4), (8, 6), (19, 8), (32, 8), (33, 4)])
def test_a_start_that_is_the_best_is_proved_to_be(seed, number):
    """The solver's presolve calls these infeasible where nothing worse than the start is asked for."""
    problem = list(random_problems(seed))[number]
    first = solve(problem, None, by_span=False, seconds=LONG_S)

    found = solve(problem, first.sequence, by_span=False, seconds=LONG_S)

    assert found.is_proved
    assert found.bound_s == first.bound_s
    assert objective_s(problem, found.sequence, by_span=False) <= found.bound_s * (1 + 1e-9)


@by_objective
@pytest.mark.parametrize("wrong", ["infeasible", "too high"])
def test_where_the_solver_contradicts_the_start_nothing_is_proved(monkeypatch, wrong, by_span):
    problem = problem_of(Placement.line(2), 4, UNEVEN, 30)
    start = solve(problem, None, by_span=by_span, seconds=LONG_S).sequence
    at_most, minimize = Model.at_most, cp_model.CpModel.minimize
    if wrong == "infeasible":
        monkeypatch.setattr(Model, "at_most", lambda model, objective: at_most(model, objective - 1))
    else:
        monkeypatch.setattr(Model, "at_most", lambda model, objective: None)
        monkeypatch.setattr(cp_model.CpModel, "minimize", lambda model, objective: minimize(model, objective + 1))

    found = solve(problem, start, by_span=by_span, seconds=LONG_S)

    assert (found.bound_s, found.is_proved) == (0.0, False)


def test_a_start_that_breaks_the_limit_does_not_keep_an_order_that_fits_from_being_found():
    problem = problem_of(Placement.line(3), 6, Costs.uniform(activation_bytes=10), 20)
    start = sequence_of(build("gpipe", ranks=3, microbatches=6))

    found = solve(problem, start, by_span=False, seconds=LONG_S)

    assert not run(problem, start).fits(problem)
    assert objective_s(problem, found.sequence, by_span=False) == found.bound_s


@by_objective
def test_without_time_nothing_is_called_proved(by_span):
    problem = problem_of(Placement.vee(4), 12, random_costs(0, 8), 60)

    found = solve(problem, None, by_span=by_span, seconds=0.01)

    assert not found.is_proved
    assert found.bound_s == 0.0
    assert found.sequence is None


def test_actions_that_take_no_time_fit_the_limit():
    costs = Costs.uniform(forward=1, backward_input=0, backward_weight=0, activation_bytes=10)
    problem = problem_of(Placement.line(2), 4, costs, 10)

    found = solve(problem, None, by_span=False, seconds=LONG_S)

    assert objective_s(problem, found.sequence, by_span=False) == found.bound_s == 8.0


def test_equal_seeds_find_the_same():
    problem = problem_of(Placement.line(4), 8, random_costs(3, 4), 30)

    one, other = (solve(problem, None, by_span=False, seconds=LONG_S, seed=5) for _ in range(2))

    assert one.sequence.tolist() == other.sequence.tolist()


def test_an_interrupt_ends_it_and_keeps_the_best_so_far(monkeypatch):
    schedule = build("zbv", ranks=4, microbatches=24)
    problem = problem_of(schedule.placement, 24, random_costs(0, 8), 80)
    timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])
    solve_without = cp_model.CpSolver.solve
    monkeypatch.setattr(cp_model.CpSolver, "solve", lambda *given: timer.start() or solve_without(*given))

    found = solve(problem, sequence_of(schedule), by_span=False, seconds=LONG_S)

    assert found.was_interrupted
    assert not found.is_proved
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # The next one goes on to its end.
    monkeypatch.undo()
    assert solve(problem_of(Placement.line(2), 2, UNEVEN), None, by_span=False, seconds=LONG_S).is_proved


def test_without_or_tools_it_says_so(monkeypatch):
    assert is_installed()
    monkeypatch.setitem(sys.modules, "ortools", None)
    assert not is_installed()
