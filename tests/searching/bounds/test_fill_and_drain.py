"""The bound of fill and drain, by hand."""

import pytest

from penstock.placement import Placement
from penstock.searching.bounds import Route
from penstock.searching.bounds.fill_and_drain import most_seconds, of_fill_and_drain
from penstock.simulation import Costs
from tests.searching.cases import problem_of


def test_a_bound_can_be_recomputed_from_its_terms_by_hand():
    """p = 2, m = 3, parts of 1 s; an activation takes 2 bytes, of which W keeps 1; a rank has room for one."""
    costs = Costs.uniform(activation_bytes=2, weight_context_bytes=1)
    problem = problem_of(Placement.line(2), 3, costs, 2)

    of_rank_0, of_rank_1 = of_fill_and_drain(Route(problem))

    # To its first I: F0, F1, I1 take 3 s, of which one F is its own; behind its last F: F1, I1, and nothing else fits.
    assert of_rank_0.terms == {"work": 9.0, "fill": 2.0, "drain": 2.0}
    assert of_rank_1.terms == {"work": 9.0, "fill": 0.0, "drain": 0.0}


def test_whole_items_of_one_size_are_counted_and_others_cut():
    assert most_seconds([4], [1.0], 10, 11) == 2.0
    assert most_seconds([4], [1.0], 2, 100) == 2.0
    assert most_seconds([4, 4], [1.0, 3.0], 1, 9) == 4.0
    assert most_seconds([4, 2], [1.0, 3.0], 1, 4) == pytest.approx(3.5)
    assert most_seconds([0, 4], [1.0, 3.0], 2, 3) == pytest.approx(2.0 + 2.25)
    assert most_seconds([4], [1.0], 10, -1) == 0.0
