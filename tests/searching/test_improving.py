"""Improvement: it ends with its share of the budget or at the goal, and reports what it finds."""

import pytest

from penstock.placement import Placement
from penstock.searching.budget import Budget
from penstock.searching.candidates import by_objective, of_constructions, of_families
from penstock.searching.improving import Improvement
from penstock.searching.question import Question
from penstock.searching.sequences import run
from tests.searching.cases import problem_of, random_costs

COSTS = random_costs(2, 6)
PROBLEM = problem_of(Placement.line(6), 16, COSTS, 60)
STARTS = sorted(of_constructions(PROBLEM, by_span=False, is_over=lambda: False), key=by_objective)[:8]
BEST_S = STARTS[0].objective_s


def improved(starts, goal_s=0.0, share=1.0, evaluations=20_000, report=lambda best_s: None):
    budget = Budget(0.0, evaluations)
    improvement = Improvement(Question(COSTS, False, 60, None, 0), budget, goal_s, share, report)
    improvement.run(starts)
    return improvement.improved, budget


def test_what_it_finds_and_reports_is_shorter_and_fits():
    reported = []
    found, _ = improved(STARTS, report=reported.append)

    best = min(found, key=by_objective)
    assert min(reported) == best.objective_s
    assert best.objective_s < 0.995 * BEST_S
    assert {each.method for each in found} == {"list", "improved"}
    for each in found:
        assert run(PROBLEM, each.sequence).fits(PROBLEM)
        assert run(PROBLEM, each.sequence).makespan_s == each.objective_s


@pytest.mark.parametrize("share", [0.25, pytest.param(1.0, marks=pytest.mark.slow)])
def test_it_ends_with_its_share_of_the_budget(share):
    _, budget = improved(STARTS, share=share)

    assert share * 20_000 <= budget.spent <= share * 20_000 + 1_000


def test_it_ends_at_the_goal():
    goal_s = BEST_S * 0.999
    found, budget = improved(STARTS, goal_s=goal_s, evaluations=200_000)

    assert min(each.objective_s for each in found) <= goal_s
    assert budget.spent < 200_000
    assert improved(STARTS, goal_s=BEST_S)[0] == []


def test_where_a_family_is_as_short_as_can_be_nothing_is_tried():
    families = of_families(problem_of(Placement.line(6), 16, COSTS), by_span=False)
    best = min(families, key=by_objective)

    _, budget = improved([best, *STARTS], goal_s=best.objective_s)

    assert best.objective_s < BEST_S
    assert budget.spent == 0


def test_families_are_moved_and_have_no_settings_to_vary():
    problem = problem_of(Placement.line(6), 16, COSTS, 140)
    families = [each for each in of_families(problem, by_span=False) if each.fits]

    found, _ = improved(families, evaluations=5_000)

    assert found
    assert {each.method for each in found} == {"improved"}


def test_without_candidates_there_is_nothing_to_do():
    assert improved([])[0] == []
