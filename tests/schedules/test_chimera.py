"""`chimera`: its order as drawn, against 1F1B, and its time and memory as published."""

import pytest

from penstock.errors import ConfigError
from penstock.schedules import build
from tests.grids import assert_grid
from tests.schedules.timing import bubble, timeline


def one_way(schedule, rank, stage, first_microbatch):
    """What a rank runs of one stage, with microbatches counted from the first of its direction."""
    return [(action.kind, action.microbatch - first_microbatch) for action in schedule[rank] if action.stage == stage]


def test_in_time_the_middle_ranks_wait_at_the_turn_only():
    assert_grid(
        build("chimera", ranks=4, microbatches=4),
        """
        0F0 0F1 .   7F2 7B2 =   7F3 7B3 =   .   0B0 =   .   .   0B1 =
        .   1F0 6F2 1F1 6F3 .   6B2 =   1B0 =   6B3 =   1B1 =
        .   5F2 2F0 5F3 2F1 .   2B0 =   5B2 =   2B1 =   5B3 =
        4F2 4F3 .   3F0 3B0 =   3F1 3B1 =   .   4B2 =   .   .   4B3 =
        """,
    )


def test_on_two_ranks_nothing_ever_waits():
    assert_grid(
        build("chimera", ranks=2, microbatches=4),
        """
        0F0 3F2 3B2 =   0F1 0B0 =   3F3 3B3 =   0B1 =
        2F2 1F0 1B0 =   2F3 2B2 =   1F1 1B1 =   2B3 =
        """,
    )


@pytest.mark.parametrize("ranks", [4, 6, 8, 12])
def test_with_as_many_microbatches_as_ranks_each_direction_is_1f1b(ranks):
    both = build("chimera", ranks=ranks, microbatches=ranks)
    plain = build("1f1b", ranks=ranks, microbatches=ranks // 2)

    for rank in range(ranks):
        assert one_way(both, rank, rank, 0) == one_way(plain, rank, rank, 0)
        place = ranks - 1 - rank
        assert one_way(both, rank, ranks + place, ranks // 2) == one_way(plain, place, place, 0)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "forward", "backward", "makespan"),
    [
        (4, 4, 1, 1, 10),
        (6, 6, 1, 1, 16),
        (8, 8, 1, 1, 22),
        (4, 8, 1, 1, 18),
        (4, 4, 1, 2, 16),
        (6, 6, 1, 2, 26),
        (8, 8, 1, 2, 36),
        (4, 8, 1, 2, 27),
    ],
)
def test_it_ends_as_early_as_any_order_of_its_placement(ranks, microbatches, forward, backward, makespan):
    costs = (forward, backward / 2, backward / 2)

    assert timeline("chimera", ranks, microbatches, costs).makespan_s == makespan


@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (2, 3), (1, 2)])
@pytest.mark.parametrize("ranks", [4, 6, 8])
def test_the_bubble_is_that_of_its_formula_for_any_number_of_microbatches(ranks, forward, backward):
    costs = (forward, backward / 2, backward / 2)

    assert bubble("chimera", ranks, ranks, costs) == (ranks - 2) * backward
    for microbatches in (ranks + 2, 2 * ranks, 5 * ranks + 2):
        assert bubble("chimera", ranks, microbatches, costs) == (ranks - 3) * backward + forward
    assert bubble("chimera", 2, ranks, costs) == 0


def test_longer_backwards_keep_the_bubble_below_that_of_few_microbatches():
    for microbatches in (8, 12, 30):
        assert bubble("chimera", 6, microbatches, (2, 3.5, 3.5)) < (6 - 2) * 7


@pytest.mark.parametrize("ranks", [4, 6, 8])
def test_memory_is_as_published_and_does_not_grow_with_the_microbatches(ranks):
    half = ranks // 2
    at_first = list(range(half + 1, ranks + 1))
    for_ever = [ranks + 1] * (half - 1) + [ranks + 2]

    assert timeline("chimera", ranks, ranks).peak_activations == at_first + at_first[::-1]
    assert timeline("chimera", ranks, 10 * ranks).peak_activations == for_ever + for_ever[::-1]


@pytest.mark.parametrize(
    ("ranks", "microbatches", "told"),
    [
        (5, 8, "ranks: chimera folds .* even number of ranks, got 5; use 6, or hanayo"),
        (4, 7, "microbatches: chimera sends half of the microbatches each way, got 7; use 8"),
    ],
)
def test_what_does_not_fold_is_refused_with_a_fix(ranks, microbatches, told):
    with pytest.raises(ConfigError, match=told):
        build("chimera", ranks=ranks, microbatches=microbatches)
