"""`interleaved-zb`: its order as drawn, as recorded from torch, its bubble and its memory."""

import pytest

from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import Costs, simulate
from tests.grids import assert_grid
from tests.schedules.golden import built, recorded, sizes
from tests.schedules.groupings import PARTS, groupings

SHAPES = [(2, 2, 4), (2, 3, 5), (3, 2, 7), (4, 1, 6), (4, 2, 8), (4, 3, 9)]
"""Ranks, stages per rank, microbatches."""


def timed(costs, **shape):
    return simulate(lower(build("interleaved-zb", **shape)), costs)


def test_weight_parts_follow_late_on_later_ranks():
    assert_grid(
        build("interleaved-zb", ranks=2, microbatches=4),
        """
        0F0 0F1 2F0 2F1 2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
        1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3
        """,
    )


def test_in_time_one_action_is_left_of_the_bubble():
    assert_grid(
        build("interleaved-zb", ranks=2, microbatches=2),
        """
        0F0 0F1 2F0 2F1 .   2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
        .   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
        """,
    )


def test_small_groups_are_as_in_interleaved_1f1b():
    assert_grid(
        build("interleaved-zb", ranks=2, microbatches=3, group=2),
        """
        0F0 0F1 2F0 2F1 2I0 2W0 0F2 2I1 2W1 0I0 0W0 2F2 0I1 0W1 2I2 2W2 0I2 0W2
        1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1I1 1W0 3F2 3I2 1W1 1I2 3W2 1W2
        """,
    )


def test_any_number_of_stages_runs():
    assert_grid(
        build("interleaved-zb", ranks=2, microbatches=2, stages=3),
        """
        0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
        1F0 1F1 1I0 1I1 1W0 1W1
        """,
    )


def test_one_stage_per_rank_is_zb_h1():
    shape = {"ranks": 4, "microbatches": 6}

    assert build("interleaved-zb", stages_per_rank=1, **shape) == build("zb-h1", **shape)


def test_forward_only_has_the_forwards_alone():
    shape = {"ranks": 3, "microbatches": 6, "forward_only": True}

    assert build("interleaved-zb", **shape) == build("interleaved-1f1b", **shape)


@pytest.mark.parametrize(("ranks", "per_rank", "microbatches"), SHAPES)
def test_weight_parts_fill_the_bubble(ranks, per_rank, microbatches):
    costs = Costs.uniform(forward=2, backward_input=3, backward_weight=2)
    timeline = timed(costs, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank)

    assert timeline.makespan_s == pytest.approx(microbatches * per_rank * 7 + (ranks - 1) * (2 + 3 - 2))


@pytest.mark.parametrize(("ranks", "per_rank", "microbatches"), SHAPES)
def test_every_rank_holds_as_much(ranks, per_rank, microbatches):
    timeline = timed(Costs.uniform(), ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank)

    group = -(-microbatches // max(1, microbatches // ranks))
    assert timeline.peak_activations == [min(per_rank * microbatches, (per_rank - 1) * group + ranks)] * ranks


@pytest.mark.parametrize("group", [2, 3])
def test_small_groups_hold_less(group):
    timeline = timed(Costs.uniform(), ranks=4, microbatches=12, stages_per_rank=3, group=group)

    assert timeline.peak_activations == [2 * group + 4] * 4


@pytest.mark.parametrize(("key", "ranks"), recorded("torch", "compute/InterleavedZeroBubble"))
def test_the_order_is_that_of_torch(key, ranks):
    found = sizes(key)
    group = found["m"] // max(1, found["m"] // found["p"])

    assert built("interleaved-zb", key) == ranks
    assert built("interleaved-zb", key, group=group) == ranks


@pytest.mark.slow
def test_the_formulas_hold_where_the_page_says_so():
    for shape in groupings():
        p, m, v, g = shape.p, shape.m, shape.v, shape.g
        peaks = shape.timeline("interleaved-zb").peak_activations
        most = [min(v * m, (v - 1) * g + p)] * p
        least_idle = (p - 1) * (PARTS["forward"] + PARTS["backward_input"] - PARTS["backward_weight"])

        assert shape.bubble("interleaved-zb") >= least_idle
        assert (shape.bubble("interleaved-zb") == least_idle) >= shape.fills_all_groups
        if g >= p / 2:
            assert all(map(int.__le__, peaks, most))
            assert (peaks == most) >= (g <= m and p <= m)
