"""`gpipe`: its order as drawn, and as recorded from other systems."""

import pytest

from penstock.schedules import build
from tests.grids import assert_grid
from tests.schedules.golden import built, recorded


@pytest.mark.feature("B2")
def test_all_forwards_come_before_all_backwards():
    assert_grid(
        build("gpipe", ranks=4, microbatches=6),
        """
        0F0 0F1 0F2 0F3 0F4 0F5 0B0 0B1 0B2 0B3 0B4 0B5
        1F0 1F1 1F2 1F3 1F4 1F5 1B0 1B1 1B2 1B3 1B4 1B5
        2F0 2F1 2F2 2F3 2F4 2F5 2B0 2B1 2B2 2B3 2B4 2B5
        3F0 3F1 3F2 3F3 3F4 3F5 3B0 3B1 3B2 3B3 3B4 3B5
        """,
    )


def test_in_time_the_bubble_is_between_the_phases():
    assert_grid(
        build("gpipe", ranks=3, microbatches=2),
        """
        0F0 0F1 .   .   .   .   .   .   0B0 =   0B1 =
        .   1F0 1F1 .   .   .   1B0 =   1B1 =
        .   .   2F0 2F1 2B0 =   2B1 =
        """,
    )


def test_backwards_can_descend():
    assert_grid(
        build("gpipe", ranks=2, microbatches=3, backward_order="descending"),
        """
        0F0 0F1 0F2 0B2 0B1 0B0
        1F0 1F1 1F2 1B2 1B1 1B0
        """,
    )


@pytest.mark.parametrize(
    ("key", "ranks"),
    [
        *recorded("torch", "exec/GPipe"),
        *recorded("torch", "ir/GPipe"),  # what torch says of itself
        *recorded("pippy", "GPipe/p"),
    ],
)
def test_the_order_is_that_of_torch_and_pippy(key, ranks):
    assert built("gpipe", key) == ranks


@pytest.mark.parametrize(("key", "ranks"), recorded("pippy", "GPipe/forward_only"))
def test_the_forwards_are_those_of_pippy(key, ranks):
    assert built("gpipe", key, forward_only=True) == ranks
