"""`zb-h2`: its order as drawn, and its bubble and memory by their formulas."""

import pytest

from penstock.schedules import build
from tests.grids import assert_grid
from tests.schedules.timing import timeline


def test_in_time_no_rank_waits_between_its_first_and_its_last_action():
    assert_grid(
        build("zb-h2", ranks=3, microbatches=5),
        """
        0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4
        .   1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4
        .   .   2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4
        """,
    )


def test_too_few_microbatches_for_the_delay_shorten_it():
    assert_grid(
        build("zb-h2", ranks=3, microbatches=3),
        """
        0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
        1F0 1F1 1F2 1I0 1I1 1W0 1I2 1W1 1W2
        2F0 2I0 2F1 2I1 2F2 2I2 2W0 2W1 2W2
        """,
    )


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
