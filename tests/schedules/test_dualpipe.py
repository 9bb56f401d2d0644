"""`dualpipe`: its order as drawn, its placement, and what it refuses."""

import pytest

from penstock.errors import ConfigError
from penstock.schedules import build
from tests.grids import assert_grid


def test_forwards_of_one_direction_overlap_with_backwards_of_the_other():
    assert_grid(
        build("dualpipe", ranks=4, microbatches=8),
        """
        0F0 0F1 0F2 7F4 7I4 7W4 7F5 (0F3;7B5) (7F6;0B0) 7B6 (7F7;0B1) 7B7 0I2 0W2 0I3 0W3
        1F0 6F4 1F1 6F5 1F2 6B4 (6F6;1B0) (1F3;6B5) (6F7;1B1) 6B6 1B2 6I7 1I3 6W7 1W3
        5F4 2F0 5F5 2F1 5F6 2B0 (2F2;5B4) (5F7;2B1) (2F3;5B5) 2B2 5B6 2I3 5I7 2W3 5W7
        4F4 4F5 4F6 3F0 3I0 3W0 3F1 (4F7;3B1) (3F2;4B4) 3B2 (3F3;4B5) 3B3 4I6 4W6 4I7 4W7
        """,
    )


def test_the_directions_meet_on_two_ranks():
    assert_grid(
        build("dualpipe", ranks=2, microbatches=4, overlap=False),
        """
        0F0 3F2 0F1 3B2 =   3F3 0B0 =   3B3 =   0I1 0W1
        2F2 1F0 2F3 1B0 =   1F1 2B2 =   1B1 =   2I3 2W3
        """,
    )


def test_half_of_the_microbatches_travels_each_way():
    schedule = build("dualpipe", ranks=4, microbatches=10)

    assert schedule.placement.routes == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert schedule.placement.rank_of_stage == (0, 1, 2, 3, 3, 2, 1, 0)
    assert schedule.route_of_microbatch.tolist() == [0] * 5 + [1] * 5


@pytest.mark.parametrize(
    ("ranks", "microbatches", "told"),
    [
        (3, 8, "ranks: dualpipe folds two directions onto an even number of ranks, got 3; use 4, or dualpipe-v"),
        (4, 9, "microbatches: dualpipe sends half of the microbatches each way, got 9; use 10"),
        (4, 6, "microbatches: dualpipe needs .* got 6 on 4 ranks; use 8 or more, or chimera"),
    ],
)
def test_what_does_not_fold_is_refused_with_a_fix(ranks, microbatches, told):
    with pytest.raises(ConfigError, match=told):
        build("dualpipe", ranks=ranks, microbatches=microbatches)
