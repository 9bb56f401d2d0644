"""Bounds of what comes before a rank's work, between and behind it, by hand."""

import pytest

from penstock.placement import Placement
from penstock.searching.bounds import Route
from penstock.searching.bounds.fill_and_drain import of_fill_and_drain, of_fill_and_end
from penstock.simulation import Costs
from tests.searching.cases import problem_of


def test_a_bound_can_be_recomputed_from_its_terms_by_hand():
    """p = 2, m = 3, parts of 1 s; an activation takes 2 bytes, of which W keeps 1; a rank has room for one."""
    costs = Costs.uniform(activation_bytes=2, weight_context_bytes=1)
    route = Route(problem_of(Placement.line(2), 3, costs, 2))

    of_rank_0, of_rank_1 = of_fill_and_drain(route)

    # To its first I: F0, F1, I1 take 3 s, of which one F is its own. Until the second F, a round: F0, F1, I1, I0, W0,
    # of which 3 are work. Behind the last F, F1 and I1: nothing else fits.
    assert of_rank_0.terms == {"work": 9.0, "fill": 2.0, "rounds": 5.0 - 3.0, "drain": 2.0}
    assert of_rank_1.terms == {"work": 9.0, "fill": 0.0, "drain": 0.0}


TABLE_8 = [
    ((16, 48, 14407, 14380, 9676, 1610, 4096, 32), 0.0697),
    ((16, 64, 14412, 14393, 9688, 1621, 4096, 32), 0.0533),
    ((16, 128, 14316, 14306, 9639, 1619, 4096, 32), 0.0274),
]


@pytest.mark.parametrize(("row", "published"), TABLE_8)
def test_what_the_zero_bubble_search_found_for_v_on_16_ranks_is_optimal(row, published):
    """arXiv 2401.10241, table 8, ZB-V; the formula of the last rank, which holds both stages of the turn."""
    p, m, f, i, w, c, hidden, heads = row
    activation, context = 34 * hidden + 5120 * heads, 32 * hidden
    sizes = {"activation_bytes": activation, "weight_context_bytes": context}
    costs = Costs.uniform(forward=f, backward_input=i, backward_weight=w, transfer=c, **sizes)

    found = [*of_fill_and_end(Route(problem_of(Placement.vee(p), m, costs, 2 * p * activation)))][-1]

    behind = (p - 1) * (f + i + 2 * c)  # from the F' of the last rank to its I'
    room = (2 * p - 2) * activation
    held = max(n * (i + w) + (room - n * activation) // context * w for n in range(2 * p - 1))
    assert found.rank == p - 1
    assert found.terms == pytest.approx(
        {
            "begin": (p - 1) * (f + c),
            "work": 2 * m * (f + i + w),
            "fill": behind - (2 * p - 2) * f,
            "end": behind + (p - 1) * (i + c) + w - 2 * w - held,
        },
        rel=1e-9,
    )
    assert round(1 - 2 * m * (f + i + w) / found.seconds, 4) == published


def test_of_a_v_with_few_microbatches_the_first_rank_idles_until_the_first_i_of_its_first_stage():
    """p = 4, m = 2, no limit: 8 F and 7 I until then, of which 3 are its own."""
    route = Route(problem_of(Placement.vee(4), 2, Costs.uniform()))

    of_rank_0 = next(iter(of_fill_and_drain(route)))

    # Meanwhile it can run W' of this microbatch, and F, F', I' and W' of the other one.
    assert of_rank_0.terms == {"work": 12.0, "fill": 15.0 - 3.0 - 1.0 - 4.0, "drain": 0.0}


def test_idle_times_that_may_be_the_same_are_not_added():
    """One microbatch on a V of 2 ranks: 4 F, 4 I and a W, whichever way they are counted."""
    route = Route(problem_of(Placement.vee(2), 1, Costs.uniform()))

    assert max(bound.seconds for of in (of_fill_and_drain, of_fill_and_end) for bound in of(route)) == 9.0
