"""`zb-h2`: its bubble and memory by their formulas."""

import pytest

from tests.schedules.timing import timeline


@pytest.mark.parametrize("costs", [(1, 1, 1), (10, 12, 8), (18, 18, 9), (6, 4, 4), (1, 2, 0)], ids=str)
def test_bubble_and_memory_are_those_of_the_formulas(costs):
    forward, backward_input, backward_weight = costs
    bubble = forward + backward_input - 2 * backward_weight
    for ranks in range(1, 7):
        for microbatches in (2 * ranks - 1, 2 * ranks, 3 * ranks + 1, 12):
            found = timeline("zb-h2", ranks, microbatches, costs)

            work = microbatches * sum(costs)
            assert found.span_s == work + (ranks - 1) * bubble
            assert found.makespan_s == work + (ranks - 1) * max(bubble, forward)
            assert found.peak_activations == [min(microbatches, 2 * ranks - 1)] * ranks
