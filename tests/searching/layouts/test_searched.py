"""Split and order of a layout searched together."""

import pytest

from penstock.searching.layouts.families import best_of_families
from penstock.searching.layouts.searched import search_layout
from tests.searching.layouts.cases import MIB, costs_of, question
from tests.searching.layouts.test_problem import ONE_SIZE, problem_of


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_a_plan_that_is_found_takes_no_longer_and_fits_with_its_gathers(shard):
    asked = question(memory_bytes=1000 * MIB, costs=costs_of(head=3.0), **ONE_SIZE)
    problem = problem_of(asked, pipeline=2, shard=shard)
    plan = best_of_families(problem)

    found = search_layout(problem, plan, 1.0)

    assert found.step_s <= plan.step_s
    assert found.peak_bytes <= problem.limit_bytes
    assert sum(found.split) == problem.num_layers
    assert (found.family == "") == found.schedule_name.startswith("searched")


def test_one_rank_has_nothing_to_search():
    problem = problem_of(question(**ONE_SIZE), pipeline=1, shard="none")
    plan = best_of_families(problem)

    assert search_layout(problem, plan, 60.0) is plan
