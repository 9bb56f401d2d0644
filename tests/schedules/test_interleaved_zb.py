"""`interleaved-zb`: its order as drawn, as recorded from torch, its bubble and its memory."""

import pytest

from penstock.schedules import build
from tests.schedules.golden import assert_recorded
from tests.schedules.groupings import PARTS, SHAPES, assert_formulas_hold, group_of_torch
from tests.schedules.timing import timeline
from tests.support.grids import assert_grid


def test_small_groups_are_as_in_interleaved_1f1b():
    assert_grid(
        build("interleaved-zb", ranks=2, microbatches=3, group_size=2),
        """
        0F0 0F1 2F0 2F1 2I0 2W0 0F2 2I1 2W1 0I0 0W0 2F2 0I1 0W1 2I2 2W2 0I2 0W2
        1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1I1 1W0 3F2 3I2 1W1 1I2 3W2 1W2
        """,
    )


def test_one_stage_per_rank_is_zb_h1():
    shape = {"ranks": 4, "microbatches": 6}

    assert build("interleaved-zb", stages_per_rank=1, **shape) == build("zb-h1", **shape)


@pytest.mark.parametrize(("ranks", "per_rank", "microbatches"), SHAPES)
def test_weight_parts_fill_the_bubble_and_every_rank_holds_as_much(ranks, per_rank, microbatches):
    found = timeline("interleaved-zb", ranks, microbatches, (2, 3, 2), stages_per_rank=per_rank)

    assert found.makespan_s == pytest.approx(microbatches * per_rank * 7 + (ranks - 1) * (2 + 3 - 2))
    most = (per_rank - 1) * group_of_torch(ranks, microbatches) + ranks
    assert found.peak_activations == [min(per_rank * microbatches, most)] * ranks


@pytest.mark.feature("X38")
def test_the_order_is_that_of_torch():
    for options in (lambda size: {}, lambda size: {"group_size": size["m"] // max(1, size["m"] // size["p"])}):
        assert_recorded("interleaved-zb", "torch", "compute/InterleavedZeroBubble", options)


@pytest.mark.slow
def test_the_formulas_hold_where_the_page_says_so():
    forward, backward_input, backward_weight = PARTS
    idle_s = forward + backward_input - backward_weight

    assert_formulas_hold("interleaved-zb", idle_s, lambda p, v, g, s: (v - 1) * g + p)
