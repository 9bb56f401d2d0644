"""`gpipe`: its order as drawn, and as recorded from other systems."""

import pytest

from penstock.schedules import build
from tests.schedules.golden import assert_recorded
from tests.support.grids import assert_grid


def test_backwards_can_descend():
    assert_grid(
        build("gpipe", ranks=2, microbatches=3, backward_order="descending"),
        """
        0F0 0F1 0F2 0B2 0B1 0B0
        1F0 1F1 1F2 1B2 1B1 1B0
        """,
    )


@pytest.mark.parametrize(
    ("system", "prefix", "options"),
    [
        ("torch", "exec/GPipe", {}),
        ("torch", "ir/GPipe", {}),  # what torch says of itself
        ("pippy", "GPipe/p", {}),
        ("pippy", "GPipe/forward_only", {"forward_only": True}),
    ],
)
def test_the_order_is_that_of_torch_and_pippy(system, prefix, options):
    assert_recorded("gpipe", system, prefix, lambda size: options)
