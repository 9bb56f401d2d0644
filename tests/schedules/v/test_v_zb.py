"""`v-zb`: its order and its block as drawn, and its bubble."""

import pytest

from penstock.schedules import build
from penstock.schedules.v.slots import fill_weights, repeat
from penstock.schedules.v.v_zb import block
from tests.grids import assert_grid
from tests.schedules.timing import timeline
from tests.schedules.v.tables import assert_table


def test_four_ranks_as_in_its_docstring():
    schedule = build("v-zb", ranks=4, microbatches=4)

    assert schedule.placement.style == "v"
    assert_grid(
        schedule,
        """
        0F0 0F1 0F2 0F3 7F0 7I0 7W0 7F1 7I1 7W1 7F2 7I2 7W2 7F3 7I3 0I0 7W3 0W0 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1F1 1F2 1F3 6F0 6F1 6I0 6W0 6F2 6I1 6W1 6F3 6I2 1I0 6W2 1W0 6I3 1I1 6W3 1W1 1I2 1W2 1I3 1W3
        2F0 2F1 2F2 5F0 2F3 5F1 5F2 5I0 5W0 5F3 5I1 2I0 5W1 2W0 5I2 2I1 5W2 2W1 5I3 2I2 5W3 2W2 2I3 2W3
        3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 4I0 3I0 4W0 3W0 4I1 3I1 4W1 3W1 4I2 3I2 4W2 3W2 4I3 3I3 4W3 3W3
        """,
    )


def test_its_block_as_in_its_docstring():
    assert_table(
        fill_weights(repeat(block(3), 1)),
        """
        rank 0:  F  .  .  .  .  .  .  .  .  .  .  .  .  f  b  w  .  .  .  .  .  .  .  .  .  .  .  B  w
        rank 1:  .  .  .  .  F  .  .  .  .  .  .  f  .  .  .  .  .  .  b  w  .  .  .  .  .  B  w
        rank 2:  .  .  .  .  .  .  .  .  F  f  .  .  .  .  .  .  .  .  .  .  .  .  b  B  w  w
        """,
    )


def test_with_eight_microbatches_four_ranks_reach_the_certified_optimum():
    found = timeline("v-zb", 4, 8)

    assert (found.span_s, found.makespan_s, max(found.peak_activations)) == (48, 51, 8)


@pytest.mark.slow
def test_with_equal_costs_no_rank_waits_between_its_first_and_its_last_action():
    for ranks in range(1, 13):
        for microbatches in (2 * ranks, 2 * ranks + 1, 3 * ranks):
            found = timeline("v-zb", ranks, microbatches)

            assert found.span_s == 6 * microbatches
            assert found.makespan_s == 6 * microbatches + ranks - 1


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_every_rank_holds_what_rank_0_holds_in_1f1b(ranks):
    in_halves = [2 * peak for peak in timeline("1f1b", ranks, 2 * ranks).peak_activations]

    assert timeline("v-zb", ranks, 2 * ranks).peak_activations == [in_halves[0]] * ranks
