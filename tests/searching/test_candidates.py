"""Candidates: families of a shape, list schedules, and which differ."""

from dataclasses import replace

from penstock.placement import Placement
from penstock.searching.candidates import by_objective, different, of_constructions, of_families
from tests.searching.cases import problem_of, random_costs


def test_every_family_of_the_shape_is_one_and_tells_whether_it_fits():
    costs = random_costs(0, 4)
    found = list(of_families(problem_of(Placement.line(4), 8, costs), by_span=False))

    names = {each.family.name for each in found}
    assert {"1f1b", "gpipe", "zb-h1", "zb-h2", "sequential"} <= names
    assert not {"forward-only", "dualpipe", "chimera"} & names
    assert all(each.schedule() is each.family for each in found)
    found = {each.family.name: each for each in of_families(problem_of(Placement.line(4), 8, costs, 40), by_span=False)}
    assert found["1f1b"].fits
    assert not found["gpipe"].fits


def test_lists_end_with_the_time_but_not_before_one_fits():
    problem = problem_of(Placement.line(4), 8, random_costs(0, 4), 40)

    few = list(of_constructions(problem, by_span=False, is_over=lambda: True))
    assert any(each.fits for each in few)
    assert len(few) < len(list(of_constructions(problem, by_span=False, is_over=lambda: False)))


def test_the_first_of_equal_orders_stays():
    problem = problem_of(Placement.line(4), 8, random_costs(0, 4))
    first, *others = sorted(of_constructions(problem, by_span=False, is_over=lambda: False), key=by_objective)

    found = different([first, replace(first, method="improved"), *others])

    assert found[0] is first
    assert len(found) < 1 + len(others)
