"""`zbv`: its order as recorded from torch, and its bubble and memory by their formulas."""

import pytest

from tests.schedules.golden import assert_recorded
from tests.schedules.timing import timeline


@pytest.mark.feature("X38")
def test_the_order_is_that_of_torch():
    assert_recorded("zbv", "torch", "compute/ZBVZeroBubble")


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


@pytest.mark.parametrize("ranks", [1, 2, 4, pytest.param(7, marks=pytest.mark.slow)])
def test_memory_is_that_of_the_formula(ranks):
    for microbatches in range(1, 2 * ranks + 2):
        expected = [min(2 * ranks, microbatches + min(microbatches, rank + 1)) for rank in range(ranks)]

        assert timeline("zbv", ranks, microbatches).peak_activations == expected
