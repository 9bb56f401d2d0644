"""`interleaved-1f1b`: its order as drawn, as recorded from other systems, its bubble and its memory."""

import pytest

from penstock.schedules import build
from tests.grids import assert_grid
from tests.schedules.docstrings import assert_drawn
from tests.schedules.golden import built, recorded, sizes
from tests.schedules.groupings import PARTS, SHAPES, group_of_torch, groupings
from tests.schedules.timing import timeline


@pytest.mark.feature("B5")
def test_groups_follow_each_other():
    assert_drawn("interleaved-1f1b")


def test_in_time_the_last_rank_never_waits():
    assert_grid(
        build("interleaved-1f1b", ranks=2, microbatches=2),
        """
        0F0 0F1 2F0 2F1 .   .   2B0 =   .   2B1 =   0B0 =   0B1 =
        .   1F0 1F1 3F0 3B0 =   3F1 3B1 =   1B0 =   1B1 =
        """,
    )


def test_groups_may_be_larger_than_the_ranks():
    assert_grid(
        build("interleaved-1f1b", ranks=2, microbatches=5, group_size=3),
        """
        0F0 0F1 0F2 2F0 2F1 2F2 2B0 0F3 2B1 0F4 2B2 2F3 0B0 2F4 0B1 0B2 2B3 2B4 0B3 0B4
        1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4
        """,
    )


def test_a_group_has_a_microbatch_for_each_rank_unless_chosen():
    by_default = build("interleaved-1f1b", ranks=3, microbatches=7)

    assert by_default == build("interleaved-1f1b", ranks=3, microbatches=7, group_size=3)


def test_a_last_group_that_is_too_short_leaves_its_places_empty():
    assert_grid(
        build("interleaved-1f1b", ranks=2, microbatches=3, group_size=2),
        """
        0F0 0F1 2F0 2F1 0F2 2B0 2B1 2F2 0B0 0B1 2B2 0B2
        1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1B1 3F2 3B2 1B2
        """,
    )


def test_small_groups_warm_up_less():
    assert_grid(
        build("interleaved-1f1b", ranks=4, microbatches=4, group_size=2),
        """
        0F0 0F1 4F0 4F1 0F2 0F3 4B0 4F2 4B1 4F3 0B0 0B1 4B2 4B3 0B2 0B3
        1F0 1F1 5F0 5F1 1F2 5B0 1F3 5B1 5F2 1B0 5F3 1B1 5B2 5B3 1B2 1B3
        2F0 2F1 6F0 6F1 6B0 2F2 6B1 2F3 2B0 6F2 2B1 6F3 6B2 6B3 2B2 2B3
        3F0 3F1 7F0 7B0 7F1 7B1 3F2 3B0 3F3 3B1 7F2 7B2 7F3 7B3 3B2 3B3
        """,
    )


def test_groups_below_half_of_the_ranks_put_off_their_next_stage():
    assert_grid(
        build("interleaved-1f1b", ranks=4, microbatches=3, group_size=1),
        """
        0F0 0F1 4F0 0F2 4F1 4B0 4F2 4B1 0B0 4B2 0B1 0B2
        1F0 1F1 5F0 1F2 5F1 5B0 5F2 5B1 1B0 5B2 1B1 1B2
        2F0 2F1 6F0 2F2 6B0 6F1 6B1 6F2 2B0 6B2 2B1 2B2
        3F0 3F1 7F0 7B0 3F2 7F1 7B1 3B0 7F2 7B2 3B1 3B2
        """,
    )


def test_a_group_of_more_than_all_microbatches_has_all():
    all_in_one = build("interleaved-1f1b", ranks=4, microbatches=3, group_size=3)

    assert build("interleaved-1f1b", ranks=4, microbatches=3, group_size=9) == all_in_one
    assert build("interleaved-1f1b", ranks=4, microbatches=3) == all_in_one


def test_one_stage_per_rank_is_1f1b_with_an_eager_warm_up():
    shape = {"ranks": 4, "microbatches": 6}

    interleaved = build("interleaved-1f1b", stages_per_rank=1, **shape)
    assert interleaved == build("1f1b", warmup="eager", **shape)


@pytest.mark.feature("B5")
def test_any_number_of_stages_runs():
    assert_grid(
        build("interleaved-1f1b", ranks=2, microbatches=2, stages=3),
        """
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 1B0 1B1
        """,
    )


@pytest.mark.feature("B6")
def test_all_forwards_can_come_first():
    assert_grid(
        build("interleaved-1f1b", ranks=2, microbatches=2, all_forward_first=True),
        """
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
        """,
    )


@pytest.mark.parametrize(("ranks", "per_rank", "microbatches"), SHAPES)
def test_the_bubble_is_that_of_1f1b_with_smaller_stages(ranks, per_rank, microbatches):
    group = group_of_torch(ranks, microbatches)
    found = timeline("interleaved-1f1b", ranks, microbatches, (2, 3, 2), stages_per_rank=per_rank, group_size=group)

    assert found.makespan_s == pytest.approx((microbatches * per_rank + ranks - 1) * 7)


@pytest.mark.parametrize(("ranks", "per_rank", "microbatches"), SHAPES)
def test_the_memory_is_that_of_the_warm_up(ranks, per_rank, microbatches):
    group = group_of_torch(ranks, microbatches)
    found = timeline("interleaved-1f1b", ranks, microbatches, stages_per_rank=per_rank, group_size=group)

    fullest = [(per_rank - 1) * group + 2 * (ranks - rank) - 1 for rank in range(ranks)]
    assert found.peak_activations == [min(per_rank * microbatches, each) for each in fullest]


@pytest.mark.slow
def test_the_formulas_hold_where_the_page_says_so():
    for shape in groupings():
        p, m, v, g = shape.p, shape.m, shape.v, shape.g
        found = shape.timeline("interleaved-1f1b")
        bubble, peaks = shape.bubble(found), found.peak_activations
        most = [min(v * m, (v - 1) * g + 2 * (p - s) - 1) for s in range(p)]

        assert bubble >= (p - 1) * sum(PARTS)
        assert (bubble == (p - 1) * sum(PARTS)) >= shape.fills_all_groups
        if g >= p:
            assert all(map(int.__le__, peaks, most))
            assert (peaks == most) >= (m % g == 0)
        elif p / 2 <= g and p <= m:
            assert peaks == [(v - 1) * g + p - s for s in range(p)]


@pytest.mark.parametrize("group", [2, 3])
def test_small_groups_hold_less(group):
    found = timeline("interleaved-1f1b", 4, 12, stages_per_rank=3, group_size=group)

    assert found.peak_activations == [2 * group + 4 - rank for rank in range(4)]


@pytest.mark.parametrize(("ranks", "per_rank", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 3, 12), (8, 3, 24)])
def test_transfers_cost_twice_a_lap_of_the_loop(ranks, per_rank, microbatches):
    """The closed form of arXiv 2401.10241 has p transfers fewer, but in its order none of them is hidden."""
    costs = (18.522, 18.086, 9.337)  # of the 1.5B model there

    without, delayed = (
        timeline("interleaved-1f1b", ranks, microbatches, costs, stages_per_rank=per_rank, transfer=transfer)
        for transfer in (0.0, 0.6)
    )

    assert delayed.makespan_s - without.makespan_s == pytest.approx((2 * per_rank * ranks - 2) * 0.6)


@pytest.mark.parametrize(("key", "ranks"), recorded("torch", "compute/Interleaved1F1B"))
def test_the_order_is_that_of_torch(key, ranks):
    group = group_of_torch(sizes(key)["p"], sizes(key)["m"])

    assert built("interleaved-1f1b", key, group_size=group) == ranks


@pytest.mark.parametrize(("key", "ranks"), recorded("megatron", "interleaved/train"))
def test_the_order_is_that_of_megatron(key, ranks):
    found = sizes(key)

    assert built("interleaved-1f1b", key, all_forward_first=found["m"] == found["p"]) == ranks


@pytest.mark.parametrize(("key", "ranks"), recorded("megatron", "interleaved/fwd"))
def test_the_forwards_are_those_of_megatron(key, ranks):
    assert built("interleaved-1f1b", key, forward_only=True) == ranks


@pytest.mark.feature("X13")
@pytest.mark.parametrize(("key", "ranks"), recorded("megatron", "head_interleaved"))
def test_groups_of_every_size_are_those_of_megatron(key, ranks):
    assert built("interleaved-1f1b", key, group_size=sizes(key)["group"]) == ranks


@pytest.mark.parametrize(("key", "ranks"), [*recorded("pippy", "Interleaved1F1B/p"), *recorded("zero_bubble", "vpp")])
def test_by_default_the_order_is_what_pippy_and_the_zero_bubble_authors_run(key, ranks):
    assert built("interleaved-1f1b", key) == ranks
