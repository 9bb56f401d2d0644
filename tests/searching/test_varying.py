"""Variation of settings: it finds shorter list schedules, keeps to the limit, and repeats itself for equal seeds."""

import pytest

from penstock.placement import Placement
from penstock.searching.candidates import by_objective, of_constructions
from penstock.searching.sequences import run
from penstock.searching.varying import Variation
from tests.searching.cases import problem_of, random_costs

NUM_STEPS = 150


def starts_of(placement, limit):
    problem = problem_of(placement, 16, random_costs(2, placement.num_stages), limit)
    found = of_constructions(problem, by_span=False, is_over=lambda: False)
    return problem, sorted((each for each in found if each.setting is not None), key=by_objective)[:3]


@pytest.mark.parametrize(
    ("placement", "limit", "share"),
    [(Placement.line(6), 60, 1.0), (Placement.vee(4), 80, 0.99), (Placement.loop(4, 8), 130, 0.99)],
)
def test_it_finds_shorter_list_schedules_within_the_limit(placement, limit, share):
    problem, starts = starts_of(placement, limit)
    variation = Variation(starts, 0, by_span=False)

    found = [each for each in (variation.step() for _ in range(NUM_STEPS)) if each is not None]

    assert min(found, key=by_objective).objective_s < share * starts[0].objective_s
    for each in found:
        assert each.method == "list"
        assert run(problem, each.sequence).fits(problem)
        assert run(problem, each.sequence).makespan_s == each.objective_s


def test_what_it_starts_from_is_not_changed():
    _, starts = starts_of(Placement.line(6), 60)
    before = [each.setting.waits_for_share.tolist() for each in starts]
    variation = Variation(starts, 0, by_span=False)

    for _ in range(40):
        variation.step()

    assert [each.setting.waits_for_share.tolist() for each in starts] == before
