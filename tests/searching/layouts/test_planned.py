"""A schedule of a layout, with its gathers, reductions and update."""

import penstock as ps
from penstock.ir.operations import Op
from penstock.ir.recompute import with_recompute
from penstock.searching.layouts.planned import planned
from tests.searching.layouts.cases import question
from tests.searching.layouts.test_problem import ONE_SIZE, problem_of


def test_a_step_has_gathers_reductions_and_the_update_and_all_bytes():
    problem = problem_of(question(**ONE_SIZE), pipeline=2, shard="optimizer")
    schedule = ps.build("1f1b", ranks=2, microbatches=4)

    plan = planned(problem, schedule, (4, 4), "1f1b")

    assert {Op.UNSHARD, Op.REDUCE_GRADIENT, Op.OPTIMIZER_STEP} <= set(plan.plan.program.ops)
    assert plan.step_s > plan.plan.timeline.makespan_s
    assert plan.peak_bytes == plan.rank_bytes[plan.fullest_rank] == max(plan.rank_bytes)
    assert min(plan.rank_bytes) > problem.static_bytes[:4].sum()
    assert (plan.schedule_name, plan.stages_per_rank) == ("1f1b", 1)


def test_a_schedule_that_is_no_family_is_named_by_what_has_made_it_and_its_placement():
    problem = problem_of(question(**ONE_SIZE), pipeline=4)
    found = ps.search_joint(problem.resident_costs, 4, 8, placement="v", stages_per_rank=2, evaluations=200).schedule
    again = with_recompute(ps.build("1f1b", ranks=4, microbatches=8))

    searched, recomputed = planned(problem, found, (1,) * 8), planned(problem, again, (2,) * 4)

    assert (searched.schedule_name, searched.num_recomputed) == ("searched v", 0)
    assert (recomputed.schedule_name, recomputed.num_recomputed) == ("1f1b line", 4)
