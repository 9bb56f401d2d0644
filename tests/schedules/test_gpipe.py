"""`gpipe`: its order as drawn, and as recorded from other systems."""

import pytest

from penstock.schedules import build
from tests.schedules.docstrings import assert_drawn
from tests.schedules.golden import built, recorded
from tests.support.grids import assert_grid


@pytest.mark.feature("B2")
def test_all_forwards_come_before_all_backwards():
    assert_drawn("gpipe")


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
