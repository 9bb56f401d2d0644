"""`interleaved-1f1b`: its order as drawn, as recorded from other systems, its bubble and its memory."""

import pytest

from penstock.schedules import build
from tests.schedules.golden import assert_recorded
from tests.schedules.groupings import PARTS, SHAPES, group_of_torch, groupings
from tests.schedules.timing import timeline


def test_a_group_of_more_than_all_microbatches_has_all():
    all_in_one = build("interleaved-1f1b", ranks=4, microbatches=3, group_size=3)

    assert build("interleaved-1f1b", ranks=4, microbatches=3, group_size=9) == all_in_one
    assert build("interleaved-1f1b", ranks=4, microbatches=3) == all_in_one


def test_one_stage_per_rank_is_1f1b_with_an_eager_warm_up():
    shape = {"ranks": 4, "microbatches": 6}

    interleaved = build("interleaved-1f1b", stages_per_rank=1, **shape)
    assert interleaved == build("1f1b", warmup="eager", **shape)


@pytest.mark.parametrize(("ranks", "per_rank", "microbatches"), SHAPES)
def test_the_bubble_is_that_of_1f1b_with_smaller_stages_and_the_memory_that_of_the_warm_up(
    ranks, per_rank, microbatches
):
    group = group_of_torch(ranks, microbatches)
    found = timeline("interleaved-1f1b", ranks, microbatches, (2, 3, 2), stages_per_rank=per_rank, group_size=group)

    assert found.makespan_s == pytest.approx((microbatches * per_rank + ranks - 1) * 7)
    fullest = [(per_rank - 1) * group + 2 * (ranks - rank) - 1 for rank in range(ranks)]
    assert found.peak_activations == [min(per_rank * microbatches, each) for each in fullest]


def test_all_forwards_first_save_no_time_and_keep_more_where_there_are_as_many_microbatches_as_ranks():
    """Megatron-LM once did so by itself; docs/schedules.md has these numbers."""
    usual, forwards_first = (
        timeline("interleaved-1f1b", 4, 4, (1, 1, 1), stages_per_rank=2, all_forward_first=first)
        for first in (False, True)
    )

    assert usual.makespan_s == forwards_first.makespan_s
    assert (usual.peak_activations[-1], forwards_first.peak_activations[-1]) == (5, 8)


@pytest.mark.slow
def test_the_formulas_hold_where_the_page_says_so():
    for shape in groupings():
        p, m, v, g = shape.p, shape.m, shape.v, shape.g
        found = shape.timeline("interleaved-1f1b")
        bubble, peaks = shape.bubble(found), found.peak_activations
        most = [min(v * m, (v - 1) * g + 2 * (p - s) - 1) for s in range(p)]

        assert bubble >= (p - 1) * sum(PARTS)
        assert (bubble == (p - 1) * sum(PARTS)) >= shape.fills_all_groups
        if g >= p:
            assert all(map(int.__le__, peaks, most))
            assert (peaks == most) >= (m % g == 0)
        elif p / 2 <= g and p <= m:
            assert peaks == [(v - 1) * g + p - s for s in range(p)]


@pytest.mark.feature("B6", "X13")
@pytest.mark.parametrize(
    ("system", "prefix", "options"),
    [
        ("torch", "compute/Interleaved1F1B", lambda size: {"group_size": group_of_torch(size["p"], size["m"])}),
        ("megatron", "interleaved/train", lambda size: {"all_forward_first": size["m"] == size["p"]}),
        ("megatron", "interleaved/fwd", lambda size: {"forward_only": True}),
        ("megatron", "head_interleaved", lambda size: {"group_size": size["group"]}),
        ("pippy", "Interleaved1F1B/p", lambda size: {}),
        ("zero_bubble", "vpp", lambda size: {}),
    ],
)
def test_the_order_is_that_of_torch_megatron_pippy_and_the_zero_bubble_authors(system, prefix, options):
    assert_recorded("interleaved-1f1b", system, prefix, options)
