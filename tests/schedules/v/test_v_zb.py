"""`v-zb`: its bubble and its memory."""

import pytest

from tests.schedules.timing import timeline


def test_with_eight_microbatches_four_ranks_reach_the_certified_optimum():
    found = timeline("v-zb", 4, 8)

    assert (found.span_s, found.makespan_s, max(found.peak_activations)) == (48, 51, 8)


@pytest.mark.parametrize("ranks", [1, 2, 3, *(pytest.param(number, marks=pytest.mark.slow) for number in range(4, 13))])
def test_with_equal_costs_no_rank_waits_between_its_first_and_its_last_action(ranks):
    for microbatches in (2 * ranks, 2 * ranks + 1, 3 * ranks):
        found = timeline("v-zb", ranks, microbatches)

        assert found.span_s == 6 * microbatches
        assert found.makespan_s == 6 * microbatches + ranks - 1


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_every_rank_holds_what_rank_0_holds_in_1f1b(ranks):
    in_halves = [2 * peak for peak in timeline("1f1b", ranks, 2 * ranks).peak_activations]

    assert timeline("v-zb", ranks, 2 * ranks).peak_activations == [in_halves[0]] * ranks
