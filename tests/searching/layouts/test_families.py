"""The best family of a layout that fits."""

from penstock.searching.layouts.families import best_of_families, least_plans, placements_of
from tests.searching.layouts.cases import MIB, costs_of, question
from tests.searching.layouts.test_problem import ONE_SIZE, problem_of


def plan_of(memory_bytes, **fields):
    return best_of_families(problem_of(question(memory_bytes=memory_bytes, **ONE_SIZE), **fields))


def test_the_fastest_family_fits_and_less_memory_takes_longer():
    plans = [plan_of(limit * MIB, pipeline=4) for limit in (2000, 470, 430)]

    assert [plan.peak_bytes <= limit * MIB for plan, limit in zip(plans, (2000, 470, 430), strict=True)] == [True] * 3
    assert plans[0].step_s <= plans[1].step_s <= plans[2].step_s
    assert plans[0].step_s < plans[2].step_s


def test_layers_are_split_by_memory_where_a_split_by_seconds_does_not_fit():
    """With a heavy head, the first rank has the most layers, and the most bytes."""
    asked = {"gpus": 2, "costs": costs_of(head=4.0)} | ONE_SIZE
    balanced, by_memory = (
        best_of_families(problem_of(question(memory_bytes=limit * MIB, **asked), pipeline=2)) for limit in (4000, 850)
    )

    assert by_memory.peak_bytes <= 850 * MIB < balanced.peak_bytes
    assert by_memory.split != balanced.split
    assert sum(by_memory.split) == 8


def test_families_of_least_memory_are_split_too_where_the_fastest_do_not_fit():
    problem = problem_of(question(gpus=2, memory_bytes=780 * MIB, **ONE_SIZE), pipeline=2)

    assert best_of_families(problem).peak_bytes <= 780 * MIB


def test_nothing_is_returned_where_nothing_fits():
    assert plan_of(300 * MIB, pipeline=4) is None


def test_the_plan_of_least_memory_is_there_whether_it_fits_or_not():
    problem = problem_of(question(memory_bytes=300 * MIB, **ONE_SIZE), pipeline=4)

    assert min(plan.peak_bytes for plan in least_plans(problem)) > 300 * MIB


def test_a_rank_alone_has_no_waves_and_shards_have_many_stages():
    asked = question(**ONE_SIZE)

    assert [p.num_stages for p in placements_of(problem_of(asked, pipeline=1, shard="none"))] == [1, 2, 4]
    assert [p.num_stages for p in placements_of(problem_of(asked, pipeline=1, shard="full"))] == [4, 8]
    assert [(p.style, p.num_stages) for p in placements_of(problem_of(asked, pipeline=4))] == [
        ("loop", 4), ("loop", 8), ("wave", 8),
    ]  # fmt: skip
