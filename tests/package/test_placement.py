"""Placements: which rank holds which stage, and what comes before what on a route."""

from fractions import Fraction

import pytest
from hypothesis import given

from penstock.errors import ScheduleError
from penstock.placement import Placement
from tests.support.strategies import placements


@pytest.mark.feature("B18", "B21")
@pytest.mark.parametrize(
    ("placement", "style", "stages_of_rank"),
    [
        (Placement.line(4), "line", ((0,), (1,), (2,), (3,))),
        (Placement.loop(4, 8), "loop", ((0, 4), (1, 5), (2, 6), (3, 7))),
        (Placement.loop(4, 6), "loop", ((0, 4), (1, 5), (2,), (3,))),
        (Placement.vee(4), "v", ((0, 7), (1, 6), (2, 5), (3, 4))),
        (Placement.wave(4, 16), "wave", ((0, 7, 8, 15), (1, 6, 9, 14), (2, 5, 10, 13), (3, 4, 11, 12))),
        (Placement.bidirectional(4), "bidirectional", ((0, 7), (1, 6), (2, 5), (3, 4))),
        (Placement.explicit([1, 0, 1]), "explicit", ((1,), (0, 2))),
    ],
)
def test_stages_lie_where_the_style_says(placement, style, stages_of_rank):
    assert placement.style == style
    assert placement.stages_of_rank == stages_of_rank


@pytest.mark.feature("C8")
def test_the_neighbours_of_a_stage_are_those_on_its_route():
    placement = Placement.explicit([0, 1, 1, 0], [[0, 1], [2, 3]])

    assert placement.previous_stage == (-1, 0, -1, 2)
    assert placement.next_stage == (1, -1, 3, -1)
    assert placement.route_of_stage == (0, 0, 1, 1)
    in_any_order = Placement.explicit([0, 1, 2], [[2, 0, 1]])
    assert (in_any_order.previous_stage, in_any_order.next_stage) == ((2, 0, -1), (1, -1, 0))
    assert Placement.bidirectional(3).routes == ((0, 1, 2), (3, 4, 5))


@given(placements())
def test_previous_and_next_are_inverse_and_every_stage_is_on_exactly_one_rank(placement):
    for stage, following in enumerate(placement.next_stage):
        assert following == -1 or placement.previous_stage[following] == stage
    assert placement.previous_stage.count(-1) == placement.next_stage.count(-1) == len(placement.routes)
    held = [(stage, rank) for rank, stages in enumerate(placement.stages_of_rank) for stage in stages]
    assert dict(held) == dict(enumerate(placement.rank_of_stage))
    assert len(held) == placement.num_stages


@pytest.mark.parametrize("rank_of_stage", [(), (1,), (0, 2)])
def test_a_rank_without_stages_is_refused(rank_of_stage):
    with pytest.raises(ScheduleError, match="number the ranks 0, 1"):
        Placement.explicit(rank_of_stage)


@pytest.mark.parametrize("routes", [[], [[0]], [[0, 1], [1]], [[0, 1, 2]], [[0, 0, 1]], [[0, 1], []], [[], [0, 1]]])
def test_a_stage_on_no_route_or_on_two_and_a_route_without_stages_are_refused(routes):
    told = rf"route {routes.index([])} has no stages.*drop it" if [] in routes else "exactly one route"
    with pytest.raises(ScheduleError, match=told):
        Placement.explicit([0, 1], routes)


def test_a_microbatch_visits_one_stage_of_each_rank_unless_it_returns():
    assert Placement.line(4).stages_per_rank == 1
    assert Placement.loop(4, 8).stages_per_rank == 2
    assert Placement.loop(2, 3).stages_per_rank == Fraction(3, 2)
    assert Placement.bidirectional(4).stages_per_rank == 1
