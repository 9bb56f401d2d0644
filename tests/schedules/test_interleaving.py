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
