"""The start of a search: what fits under a limit that leaves room for messages, and what is said where nothing does."""

import pytest

from penstock.ir.live import peak_bytes
from penstock.lowering import lower
from penstock.placement import Placement
from penstock.searching.budget import Budget
from penstock.searching.candidates import of_families
from penstock.searching.question import Question, limited_problem
from penstock.searching.starting import MOST_STARTS, nothing_fits, starts_of
from penstock.simulation import Costs

SIZES = {"activation_bytes": 10, "weight_context_bytes": 5}


def asked_for(memory_limit, **costs):
    question = Question(Costs.uniform(**SIZES, **costs), False, memory_limit, None, 0)
    return limited_problem(Placement.line(4), 8, question.costs, memory_limit), question


def test_the_best_come_first_and_all_fit():
    problem, question = asked_for(45)
    budget = Budget(60.0, None)
    families = list(of_families(problem, by_span=question.by_span))

    found = starts_of(problem, families, question, budget)

    assert [each.objective_s for each in found] == sorted(each.objective_s for each in found)
    assert all(each.fits for each in found)
    assert {each.method for each in found} <= {"family", "list"}
    assert 1 < len(found) <= MOST_STARTS < budget.spent


def test_a_limit_is_lowered_by_what_messages_need():
    problem, question = asked_for(45, message_bytes=8)
    budget = Budget(60.0, None)
    families = list(of_families(problem, by_span=question.by_span))

    best = starts_of(problem, families, question, budget)[0]

    assert (best.problem.limit < problem.limit).any()
    sizes = question.costs.stage_bytes(problem.placement, 8)
    assert max(peak_bytes(lower(best.schedule()), sizes)) <= 45


@pytest.mark.parametrize(("limit", "held"), [(9, "10 bytes"), ("1 microbatch", "1 activation")])
def test_where_nothing_fits_it_says_what_one_microbatch_takes(limit, held):
    problem, question = asked_for(limit)

    assert f"rank 0 holds {held}. Raise the limit" in str(nothing_fits([(problem, question)]))


def test_of_several_placements_the_one_that_needs_least_is_told():
    question = Question(Costs.uniform(activation_bytes=(10,) * 7 + (90,)), False, 20, None, 0)
    problems = [limited_problem(placed, 8, question.costs, 20) for placed in (Placement.vee(4), Placement.loop(4, 8))]

    assert "holds 100 bytes" in str(nothing_fits([(problem, question) for problem in problems]))
