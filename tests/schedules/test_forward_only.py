"""`forward-only`: its order as drawn, and as recorded from another system."""

import pytest

from penstock.schedules import build
from tests.grids import assert_grid
from tests.schedules.golden import built, recorded


@pytest.mark.feature("B11")
def test_every_microbatch_goes_forward_in_order():
    assert_grid(
        build("forward-only", ranks=4, microbatches=6),
        """
        0F0 0F1 0F2 0F3 0F4 0F5
        .   1F0 1F1 1F2 1F3 1F4 1F5
        .   .   2F0 2F1 2F2 2F3 2F4 2F5
        .   .   .   3F0 3F1 3F2 3F3 3F4 3F5
        """,
    )


def test_a_rank_with_several_stages_runs_one_after_the_other():
    schedule = build("forward-only", ranks=2, microbatches=2, stages_per_rank=2)

    assert schedule.placement.style == "loop"
    assert_grid(
        schedule,
        """
        0F0 0F1 2F0 2F1
        1F0 1F1 3F0 3F1
        """,
    )


@pytest.mark.parametrize(("key", "ranks"), recorded("torch", "exec/forward_only"))
def test_the_order_is_what_torch_runs(key, ranks):
    assert built("forward-only", key) == ranks
