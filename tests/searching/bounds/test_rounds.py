"""Rounds, by hand."""

from penstock.placement import Placement
from penstock.searching.bounds import Route
from penstock.searching.bounds.bound import RankCosts
from penstock.searching.bounds.rounds import rounds_of
from penstock.simulation import Costs
from tests.searching.cases import problem_of


def rounds(placement, microbatches, limit, rank, place, **others):
    costs = Costs.uniform(activation_bytes=7, weight_context_bytes=3, **others)
    route = Route(problem_of(placement, microbatches, costs, limit))
    return rounds_of(route, RankCosts.of(route, rank), place)


def test_on_the_last_rank_of_a_v_both_activations_must_have_gone_before_the_next_second_f():
    """Of each microbatch: F', 2 s on rank 0, I', and the next F and I, W, W' before the next F' has room."""
    found = rounds(Placement.vee(2), 6, 14, rank=1, place=1)

    assert found.start_s.tolist() == [8.0 * each for each in range(6)]
    assert found.busy_s.tolist() == [6.0 * each for each in range(6)]


def test_there_are_none_without_a_limit_or_where_the_work_takes_as_long():
    assert rounds(Placement.vee(2), 6, None, rank=1, place=1) is None
    assert rounds(Placement.vee(2), 6, 28, rank=1, place=1) is None
    assert rounds(Placement.vee(2), 1, 14, rank=1, place=1) is None


def test_the_work_before_an_f_may_be_that_of_the_slowest_microbatches():
    found = rounds(Placement.vee(2), 3, 14, rank=1, place=1, microbatch_compute_factor=(1.0, 1.0, 3.0), transfer=9.0)

    assert found.busy_s.tolist() == [0.0, 18.0, 24.0]
