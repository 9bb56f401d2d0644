"""Interleaving: how microbatches are cut into groups, their turns, and that every shape can run."""

import numpy as np
import pytest

from penstock.ir.deps import predecessors
from penstock.ir.walk import walk
from penstock.schedules.family import Shape
from penstock.schedules.interleaving import Groups, Turns, interleave, split_backwards
from tests.grids import assert_grid


def shape(ranks, stages, microbatches):
    return Shape(ranks, stages, microbatches, 1)


def can_run(schedule):
    return walk(schedule.offsets, predecessors(schedule), schedule.joined, schedule.kind + 1.0).is_complete


def drawn(turns):
    """The forwards in the order of their turns: the stage as a letter and the microbatch, a dot where none is."""
    line = ["."] * (int(turns.turn.max()) + 1)
    for turn, local_stage, microbatch in zip(turns.turn, turns.local_stage, turns.microbatch, strict=True):
        line[turn] = f"{'abcd'[local_stage]}{microbatch}"
    return " ".join(line)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "sizes"), [(2, 6, [2, 2, 2]), (2, 7, [3, 2, 2]), (4, 7, [7]), (4, 3, [3]), (1, 2, [1, 1])]
)
def test_even_groups_have_a_microbatch_for_each_rank(ranks, microbatches, sizes):
    groups = Groups.even(shape(ranks, ranks, microbatches))

    assert groups.sizes.tolist() == sizes
    assert groups.num_slots.tolist() == sizes


@pytest.mark.parametrize(
    ("size", "microbatches", "sizes", "num_slots"),
    [
        (3, 6, [3, 3], [3, 3]),
        (4, 5, [4, 1], [4, 3]),  # as many slots as there are ranks
        (5, 9, [5, 4], [5, 4]),
        (2, 5, [2, 2, 1], [2, 2, 2]),  # but no more than the others have
        (9, 2, [2], [2]),
    ],
)
def test_a_last_group_that_is_shorter_is_padded_to_the_ranks(size, microbatches, sizes, num_slots):
    groups = Groups.of_size(size, shape(3, 3, microbatches))

    assert groups.sizes.tolist() == sizes
    assert groups.num_slots.tolist() == num_slots


def test_a_group_runs_on_one_stage_after_the_other():
    groups = Groups.of_size(3, shape(2, 4, 5))

    assert drawn(Turns.take(groups, 2, least_gap=1)) == "a0 a1 a2 b0 b1 b2 a3 a4 b3 b4"


def test_what_a_short_group_lacks_stays_empty():
    groups = Groups.of_size(2, shape(2, 6, 3))

    assert drawn(Turns.take(groups, 3, least_gap=1)) == "a0 a1 b0 b1 c0 c1 a2 . b2 . c2"


@pytest.mark.parametrize(
    ("num_local_stages", "least_gap", "expected"),
    [
        (2, 1, "a0 b0 a1 b1 a2 b2"),
        (2, 2, "a0 . a1 b0 a2 b1 . b2"),  # after two turns comes the next a, so b waits one more
        (3, 2, "a0 . b0 a1 c0 b1 a2 c1 b2 . c2"),
        (4, 2, "a0 . b0 . a1 c0 b1 d0 a2 c1 b2 d1 . c2 . d2"),
    ],
)
def test_groups_that_are_too_small_put_off_their_next_stage(num_local_stages, least_gap, expected):
    groups = Groups.of_size(1, shape(4, 4, 3))

    assert drawn(Turns.take(groups, num_local_stages, least_gap)) == expected


def test_a_single_group_needs_no_gap():
    groups = Groups.of_size(2, shape(8, 16, 2))

    assert drawn(Turns.take(groups, 2, least_gap=4)) == "a0 a1 b0 b1"


def test_each_rank_warms_up_longer_than_the_next():
    groups = Groups.of_size(3, shape(3, 3, 3))

    assert_grid(
        interleave("toy", shape(3, 3, 3), groups, 1),
        """
        0F0 0F1 0F2 0B0 0B1 0B2
        1F0 1F1 1B0 1F2 1B1 1B2
        2F0 2B0 2F1 2B1 2F2 2B2
        """,
    )
    assert_grid(
        interleave("toy", shape(3, 3, 3), groups, 0),
        """
        0F0 0B0 0F1 0B1 0F2 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
        2F0 2B0 2F1 2B1 2F2 2B2
        """,
    )


def test_weight_parts_are_held_back_by_the_rank():
    groups = Groups.of_size(3, shape(2, 2, 3))

    assert_grid(
        interleave("toy", shape(2, 2, 3), groups, 1, held_weights=2),
        """
        0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
        """,
    )


def test_more_held_weight_parts_than_backwards_run_last():
    order = np.array([[0, 0, 0], [1, 0, 0]], np.int32)

    assert split_backwards(order, 3).tolist() == [[0, 0, 0], [2, 0, 0], [3, 0, 0]]


def test_all_forwards_can_come_first():
    groups = Groups.of_size(1, shape(2, 4, 2))

    assert_grid(
        interleave("toy", shape(2, 4, 2), groups, None),
        """
        0F0 2F0 0F1 2F1 2B0 0B0 2B1 0B1
        1F0 3F0 1F1 3F1 3B0 1B0 3B1 1B1
        """,
    )


def test_stages_that_are_no_multiple_of_the_ranks_leave_their_turns_empty():
    assert_grid(
        interleave("toy", shape(2, 3, 4), Groups.even(shape(2, 3, 4)), 1),
        """
        0F0 0F1 2F0 2F1 2B0 0F2 2B1 0F3 0B0 2F2 0B1 2F3 2B2 2B3 0B2 0B3
        1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3
        """,
    )


def test_the_placement_is_a_line_where_each_rank_has_one_stage():
    groups = Groups.even(shape(2, 2, 2))

    assert interleave("toy", shape(2, 2, 2), groups, 1).placement.style == "line"
    assert interleave("toy", shape(2, 3, 2), groups, 1).placement.style == "loop"


def skews_that_can_run(groups, num_ranks):
    """A skew of two needs groups of p microbatches, or a single one."""
    return (1, 2) if len(groups.sizes) == 1 or groups.sizes[0] >= num_ranks else (1,)


@pytest.mark.feature("B5")
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 8])
def test_every_shape_can_run_in_groups_of_every_size(num_ranks):
    for stages in {num_ranks, 2 * num_ranks, 2 * num_ranks + 1, 3 * num_ranks - 1, 4 * num_ranks}:
        for microbatches in (1, 2, 3, 5, 8, 13, 17):
            sizes = shape(num_ranks, stages, microbatches)
            cuts = [Groups.even(sizes), *(Groups.of_size(size, sizes) for size in range(1, microbatches + 1))]
            for groups in cuts:
                for skew in skews_that_can_run(groups, num_ranks):
                    schedule = interleave("toy", sizes, groups, skew)
                    assert can_run(schedule), (sizes, groups, skew)


def test_a_long_skew_and_small_groups_would_wait_for_each_other():
    sizes = shape(4, 8, 8)

    assert can_run(interleave("toy", sizes, Groups.of_size(2, sizes), 1))
    assert not can_run(interleave("toy", sizes, Groups.of_size(2, sizes), 2))
