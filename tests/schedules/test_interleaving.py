"""Interleaving: how microbatches are cut into groups, their turns, and that every shape can run."""

import pytest

from penstock.ir.deps import predecessors
from penstock.ir.walk import walk
from penstock.schedules.family import Shape
from penstock.schedules.interleaving import Groups, Turns, interleave


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


def test_the_placement_is_a_line_where_each_rank_has_one_stage():
    groups = Groups.even(shape(2, 2, 2))

    assert interleave("toy", shape(2, 2, 2), groups, 1).placement.style == "line"
    assert interleave("toy", shape(2, 3, 2), groups, 1).placement.style == "loop"


def skews_that_can_run(groups, num_ranks):
    """A skew of two needs groups of p microbatches, or a single one."""
    return (1, 2) if len(groups.sizes) == 1 or groups.sizes[0] >= num_ranks else (1,)


@pytest.mark.feature("B5")
@pytest.mark.parametrize(
    "num_ranks", [1, 2, 3, *(pytest.param(number, marks=pytest.mark.slow) for number in (4, 5, 8))]
)
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
