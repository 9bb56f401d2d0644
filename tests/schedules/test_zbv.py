"""`zbv`: its order as drawn, as recorded from torch, and its bubble and memory by their formulas."""

import pytest

from penstock.schedules import build
from tests.grids import assert_grid
from tests.schedules.golden import built, recorded
from tests.schedules.timing import timeline


def test_in_time_no_rank_waits_between_its_first_and_its_last_action():
    assert_grid(
        build("zbv", ranks=2, microbatches=4),
        """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
        .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
        """,
    )


def test_with_few_microbatches_those_beyond_them_are_left_out():
    assert_grid(
        build("zbv", ranks=3, microbatches=2),
        """
        0F0 0F1 5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0 0I1 0W1
        1F0 1F1 4F0 4F1 4I0 4W0 4I1 4W1 1I0 1W0 1I1 1W1
        2F0 3F0 2F1 3F1 3I0 3W0 2I0 2W0 3I1 3W1 2I1 2W1
        """,
    )


@pytest.mark.feature("X38")
@pytest.mark.parametrize(("key", "ranks"), recorded("torch", "compute/ZBVZeroBubble"))
def test_the_order_is_that_of_torch(key, ranks):
    assert built("zbv", key) == ranks


@pytest.mark.parametrize("costs", [(1, 1, 1), (10, 12, 8), (18, 18, 9), (1, 2, 0)], ids=str)
def test_bubble_is_that_of_the_formula(costs):
    _, backward_input, backward_weight = costs
    bubble = 2 * (backward_input - backward_weight)
    for ranks in range(1, 7):
        for microbatches in (2 * ranks - 1, 2 * ranks, 3 * ranks + 1):
            found = timeline("zbv", ranks, microbatches, costs)

            work = 2 * microbatches * sum(costs)
            assert found.span_s == work + (ranks - 1) * bubble
            assert found.makespan_s == work + (ranks - 1) * max(bubble, backward_input)


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_memory_is_that_of_the_formula(ranks):
    for microbatches in range(1, 2 * ranks + 2):
        expected = [min(2 * ranks, microbatches + min(microbatches, rank + 1)) for rank in range(ranks)]

        assert timeline("zbv", ranks, microbatches).peak_activations == expected
