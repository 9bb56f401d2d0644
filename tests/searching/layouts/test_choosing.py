"""Branch and bound over layouts, against a look at all of them."""

import pytest

from penstock.errors import ConfigError
from penstock.searching.layouts.bounds import bound_of
from penstock.searching.layouts.choosing import choose_layouts
from penstock.searching.layouts.families import best_of_families
from tests.searching.layouts.cases import MIB, costs_of, question

FEW = {"microbatch_sizes": (1,)}
QUESTIONS = {
    "much memory": question(**FEW),
    "little memory": question(memory_bytes=400 * MIB, **FEW),
    "two nodes": question(nodes=2, memory_bytes=700 * MIB, **FEW),
    "a heavy head": question(costs=costs_of(head=6.0), memory_bytes=900 * MIB, global_batch=6, **FEW),
}


@pytest.mark.slow
@pytest.mark.feature("X44")
@pytest.mark.parametrize("name", QUESTIONS)
def test_it_finds_the_layout_that_a_look_at_all_finds_and_no_bound_is_above_a_plan(name):
    asked = QUESTIONS[name]
    plans = [(problem, best_of_families(problem)) for problem in asked.problems()]
    best = min((plan for _, plan in plans if plan is not None), key=lambda plan: plan.step_s)

    chosen = choose_layouts(asked)

    assert chosen.layouts[0].layout == best.layout
    assert chosen.layouts[0].step_s == best.step_s
    assert chosen.num_layouts == len(plans) > chosen.num_evaluated
    for problem, plan in plans:
        if plan is not None:
            assert bound_of(problem).seconds <= plan.step_s * (1 + 1e-12), problem.layout
            assert bound_of(problem).least_bytes <= plan.peak_bytes <= asked.cluster.limit_bytes, problem.layout
            assert chosen.bound.seconds <= plan.step_s * (1 + 1e-12)


def test_layouts_are_cut_off_by_their_bounds_and_those_that_are_shown_fit():
    asked = question(memory_bytes=500 * MIB, microbatch_sizes=(1,), checkpointing=("none",))

    chosen = choose_layouts(asked)

    steps_s = [plan.step_s for plan in chosen.layouts]
    assert steps_s == sorted(steps_s)
    assert chosen.bound.seconds <= steps_s[0]
    assert chosen.num_may_fit < chosen.num_layouts
    assert chosen.num_evaluated + chosen.num_cut_off == chosen.num_may_fit
    assert all(plan.peak_bytes <= asked.cluster.limit_bytes for plan in chosen.layouts)


def test_the_search_gets_the_best_few_and_its_plan_counts():
    asked, seen = question(microbatch_sizes=(1,), checkpointing=("none",)), []
    first = choose_layouts(asked)

    def search(problem, plan, seconds):
        seen.append((problem.layout, seconds))
        return plan

    chosen = choose_layouts(asked, search=search, seconds=60.0)

    assert [plan.layout for plan in chosen.layouts] == [plan.layout for plan in first.layouts]
    assert seen[0][0] == first.layouts[0].layout
    assert all(0 < seconds <= 60.0 for _, seconds in seen)


def test_it_tells_what_it_does():
    lines = []

    choose_layouts(question(microbatch_sizes=(1,), checkpointing=("none",)), tell=lines.append)

    assert lines[0].startswith("layout 1 of at most")


def test_nothing_that_fits_is_an_error_that_says_what_would():
    with pytest.raises(
        ConfigError, match=r"no layout was found that fits 4 devices of .*holds .* on rank \d: .* would do"
    ):
        choose_layouts(question(memory_bytes=210 * MIB, global_batch=64, microbatch_sizes=(1,)))


def test_where_no_family_fits_forwards_that_run_again_count():
    """Costs that were measured have one kind of checkpointing alone."""
    asked = question(gpus=2, memory_bytes=740 * MIB, microbatch_sizes=(1,), checkpointing=("none",), shards=("none",))
    assert all(best_of_families(problem) is None for problem in asked.problems())

    best = choose_layouts(asked).layouts[0]

    assert best.peak_bytes <= 740 * MIB
    assert best.num_recomputed > 0
    assert best.family == ""
