"""`group-interleaved`: its order as drawn, as recorded from its authors, its bubble and its memory."""

import pytest

from penstock.schedules import build
from tests.grids import assert_grid
from tests.schedules.golden import built, recorded, sizes
from tests.schedules.groupings import PARTS, assert_formulas_hold
from tests.schedules.timing import timeline


def test_a_last_group_that_is_too_short_leaves_its_places_empty():
    assert_grid(
        build("group-interleaved", ranks=2, microbatches=3),
        """
        0F0 0F1 2F0 2F1 2I0 2W0 0F2 2I1 2W1 0I0 0W0 2F2 0I1 0W1 2I2 2W2 0I2 0W2
        1F0 1F1 3F0 3I0 3W0 3F1 3I1 3W1 1F2 1I0 1W0 1I1 1W1 3F2 3I2 3W2 1I2 1W2
        """,
    )


def test_groups_below_half_of_the_ranks_put_off_their_next_stage():
    assert_grid(
        build("group-interleaved", ranks=4, microbatches=3, group_size=1),
        """
        0F0 0F1 4F0 0F2 4F1 4I0 4W0 4F2 4I1 4W1 0I0 0W0 4I2 4W2 0I1 0W1 0I2 0W2
        1F0 1F1 5F0 1F2 5F1 5I0 5W0 5F2 5I1 5W1 1I0 1W0 5I2 5W2 1I1 1W1 1I2 1W2
        2F0 2F1 6F0 2F2 6I0 6W0 6F1 6I1 6W1 6F2 2I0 2W0 6I2 6W2 2I1 2W1 2I2 2W2
        3F0 3F1 7F0 7I0 7W0 3F2 7F1 7I1 7W1 3I0 3W0 7F2 7I2 7W2 3I1 3W1 3I2 3W2
        """,
    )


def test_any_number_of_stages_runs():
    assert_grid(
        build("group-interleaved", ranks=2, microbatches=2, stages=3),
        """
        0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
        1F0 1F1 1I0 1W0 1I1 1W1
        """,
    )


@pytest.mark.parametrize(
    ("ranks", "per_rank", "group"), [(4, 2, 2), (4, 2, 3), (4, 3, 2), (4, 3, 4), (5, 2, 3), (6, 3, 4)]
)
def test_small_groups_trade_the_bubble_for_memory(ranks, per_rank, group):
    found = timeline("group-interleaved", ranks, 2 * group, stages_per_rank=per_rank, group_size=group)

    work, bubble = 2 * group * per_rank * 3, (ranks - 1) * 2 + (per_rank - 1) * (ranks - group)
    assert found.makespan_s == pytest.approx(work + bubble)
    fullest = [(per_rank - 1) * group + ranks - rank for rank in range(ranks)]
    assert found.peak_activations == [min(2 * group * per_rank, each) for each in fullest]


def test_groups_of_all_ranks_wait_for_forwards_and_input_parts_alone():
    found = timeline("group-interleaved", 4, 8, (2, 3, 4), stages_per_rank=3)

    assert found.makespan_s == pytest.approx(8 * 3 * 9 + 3 * 5)


@pytest.mark.parametrize(("key", "ranks"), recorded("zero_bubble", "group_interleaved"))
def test_the_order_is_that_of_the_authors(key, ranks):
    assert built("group-interleaved", key, group_size=sizes(key)["g"]) == ranks


@pytest.mark.slow
def test_the_formulas_hold_where_the_page_says_so():
    forward, backward_input, _ = PARTS

    assert_formulas_hold("group-interleaved", forward + backward_input, lambda p, v, g, s: (v - 1) * g + p - s)
