"""`group-interleaved`: its order as recorded from its authors, its bubble and its memory."""

import pytest

from tests.schedules.golden import assert_recorded
from tests.schedules.groupings import PARTS, assert_formulas_hold
from tests.schedules.timing import timeline


@pytest.mark.parametrize(
    ("ranks", "per_rank", "group"), [(4, 2, 2), (4, 2, 3), (4, 3, 2), (4, 3, 4), (5, 2, 3), (6, 3, 4)]
)
def test_small_groups_trade_the_bubble_for_memory(ranks, per_rank, group):
    found = timeline("group-interleaved", ranks, 2 * group, stages_per_rank=per_rank, group_size=group)

    work, bubble = 2 * group * per_rank * 3, (ranks - 1) * 2 + (per_rank - 1) * (ranks - group)
    assert found.makespan_s == pytest.approx(work + bubble)
    fullest = [(per_rank - 1) * group + ranks - rank for rank in range(ranks)]
    assert found.peak_activations == [min(2 * group * per_rank, each) for each in fullest]


def test_the_order_is_that_of_the_authors():
    assert_recorded("group-interleaved", "zero_bubble", "group_interleaved", lambda size: {"group_size": size["g"]})


@pytest.mark.slow
def test_the_formulas_hold_where_the_page_says_so():
    forward, backward_input, _ = PARTS

    assert_formulas_hold("group-interleaved", forward + backward_input, lambda p, v, g, s: (v - 1) * g + p - s)
