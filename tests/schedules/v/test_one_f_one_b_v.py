"""`1f1b-v`: its order and its block as drawn, and its bubble."""

import pytest

from penstock.schedules import build
from penstock.schedules.v.one_f_one_b_v import block
from penstock.schedules.v.slots import repeat, widen_backwards
from tests.grids import assert_grid
from tests.schedules.v.tables import assert_table, bubble


def test_four_ranks_as_in_its_docstring():
    schedule = build("1f1b-v", ranks=4, microbatches=4)

    assert schedule.placement.style == "v"
    assert_grid(
        schedule,
        """
        0F0 0F1 0F2 0F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 0B0 0B1 0B2 0B3
        1F0 1F1 1F2 1F3 6F0 6F1 6B0 6F2 6B1 6B2 6F3 1B0 6B3 1B1 1B2 1B3
        2F0 2F1 2F2 5F0 5F1 5F2 5B0 2F3 5B1 2B0 5F3 5B2 2B1 5B3 2B2 2B3
        3F0 4F0 3F1 4F1 3F2 4F2 4B0 3B0 3F3 4F3 4B1 3B1 4B2 3B2 4B3 3B3
        """,
    )


def test_its_block_as_in_its_docstring():
    assert_table(
        widen_backwards(repeat(block(4), 1)),
        """
        rank 0:  F  .  .  .  .  .  .  f  b  w  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .  B  w
        rank 1:  .  F  .  .  .  .  f  .  .  .  b  w  .  .  .  .  .  .  .  .  .  .  .  .  .  .  B  w
        rank 2:  .  .  F  .  .  f  .  .  .  .  .  .  b  w  .  .  .  .  .  .  .  B  w
        rank 3:  .  .  .  F  f  .  .  .  .  .  .  .  .  .  .  .  .  b  w  B  w
        """,
    )


@pytest.mark.slow
def test_bubble_is_at_most_five_sixths_of_that_of_1f1b():
    for ranks in range(1, 13):
        for microbatches in (ranks, 2 * ranks, 3 * ranks):
            assert bubble("1f1b-v", ranks, microbatches) <= 5 * (ranks - 1)
