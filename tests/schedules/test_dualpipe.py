"""`dualpipe`: its order as drawn, as recorded from its repository, and its time and memory as published."""

import pytest

from penstock.errors import ConfigError
from penstock.planning import prove_and_lower
from penstock.schedules import build
from tests.grids import assert_grid
from tests.schedules.folded import bubble, published, timeline
from tests.schedules.golden import built, recorded


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


@pytest.mark.parametrize(("key", "ranks"), recorded("dualpipe", "DualPipe/train/"))
def test_the_order_is_that_of_its_repository(key, ranks):
    assert built("dualpipe", key) == ranks


@pytest.mark.parametrize(("key", "ranks"), recorded("dualpipe", "DualPipe/train_nooverlap/"))
def test_the_order_without_overlap_is_that_of_its_repository(key, ranks):
    assert built("dualpipe", key, overlap=False) == ranks


@pytest.mark.parametrize(("key", "ranks"), recorded("dualpipe", "DualPipe/forward_only/"))
def test_the_forwards_are_those_of_its_repository(key, ranks):
    assert built("dualpipe", key, forward_only=True) == ranks


@pytest.mark.parametrize("row", published("dualpipe"), ids=str)
def test_time_and_memory_are_those_published(row):
    shape = ("dualpipe", row["ranks"], row["microbatches"])

    found = timeline(*shape)

    assert found.makespan_s == row["makespan"]
    assert found.peak_activations == [row["peak_activations"]] * row["ranks"]
    assert bubble(*shape) == row["bubble"]


@pytest.mark.parametrize("microbatches", [12, 16, 26])
def test_the_program_is_proved_with_and_without_pairs_and_backwards(microbatches):
    for options in ({}, {"overlap": False}, {"forward_only": True}):
        prove_and_lower(build("dualpipe", ranks=6, microbatches=microbatches, **options))


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
