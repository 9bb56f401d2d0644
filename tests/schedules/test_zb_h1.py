"""`zb-h1`: its order as drawn, as recorded from its authors' code, and its bubble and memory by their formulas."""

import pytest

from penstock.schedules import build
from tests.grids import assert_grid
from tests.schedules.golden import built, recorded, sizes
from tests.schedules.timing import timeline

PATCH = recorded("zero_bubble", "zbh1_patch")


def oldest_first(order):
    """A recorded order with its weight gradients as they were run: the oldest first, whatever the record calls them."""
    words = order.split()
    waiting = iter([word.replace("I", "W") for word in words if "I" in word])
    return " ".join(next(waiting) if "W" in word else word for word in words)


def kinds(order):
    """The letters of an order, with a whole backward as its two parts."""
    return "".join(letter for letter in order.replace("B", "IW") if letter in "FIW")


def test_in_time_all_ranks_end_together():
    assert_grid(
        build("zb-h1", ranks=3, microbatches=4),
        """
        0F0 0F1 0F2 .   .   0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        .   1F0 1F1 .   1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        .   .   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
        """,
    )


def test_fewer_microbatches_than_ranks_hold_back_less():
    assert_grid(
        build("zb-h1", ranks=4, microbatches=2),
        """
        0F0 0F1 0I0 0W0 0I1 0W1
        1F0 1F1 1I0 1W0 1I1 1W1
        2F0 2F1 2I0 2I1 2W0 2W1
        3F0 3I0 3F1 3I1 3W0 3W1
        """,
    )


def test_whole_backwards_split_only_what_has_to_wait():
    assert_grid(
        build("zb-h1", ranks=4, microbatches=6, backward="whole"),
        """
        0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5
        1F0 1F1 1F2 1I0 1F3 1B1 1F4 1B2 1F5 1I3 1W0 1I4 1W3 1I5 1W4 1W5
        2F0 2F1 2I0 2F2 2I1 2F3 2B2 2F4 2B3 2F5 2I4 2W0 2I5 2W1 2W4 2W5
        3F0 3I0 3F1 3I1 3F2 3I2 3F3 3B3 3F4 3B4 3F5 3I5 3W0 3W1 3W2 3W5
        """,
    )


@pytest.mark.parametrize(("key", "ranks"), PATCH)
def test_with_whole_backwards_the_order_is_that_of_the_authors_patch(key, ranks):
    assert built("zb-h1", key, backward="whole") == ranks


@pytest.mark.parametrize(("key", "ranks"), recorded("zero_bubble", "zb1p_light"))
def test_with_whole_backwards_the_order_is_what_the_authors_light_list_runs(key, ranks):
    assert built("zb-h1", key, backward="whole") == [oldest_first(order) for order in ranks]


@pytest.mark.parametrize(("key", "ranks"), [case for case in PATCH if sizes(case.id)["m"] >= sizes(case.id)["p"] - 1])
def test_with_split_backwards_the_same_kinds_of_work_stand_at_the_same_places(key, ranks):
    assert [kinds(order) for order in built("zb-h1", key)] == [kinds(order) for order in ranks]


def test_with_fewer_microbatches_the_patch_holds_back_in_the_drain_too():
    assert_grid(
        build("zb-h1", ranks=4, microbatches=2, backward="whole"),
        """
        0F0 0F1 0B0 0B1
        1F0 1F1 1I0 1I1 1W0 1W1
        2F0 2F1 2I0 2I1 2W0 2W1
        3F0 3I0 3F1 3I1 3W0 3W1
        """,
    )


@pytest.mark.parametrize("costs", [(1, 1, 1), (10, 12, 8), (18, 18, 9), (6, 4, 4), (1, 2, 0)], ids=str)
def test_bubble_and_memory_are_those_of_the_formulas(costs):
    forward, backward_input, backward_weight = costs
    for ranks in range(1, 7):
        bubble = (ranks - 1) * (forward + backward_input - backward_weight)
        for microbatches in (ranks, ranks + 1, 2 * ranks + 1, 12):
            found = timeline("zb-h1", ranks, microbatches, costs)

            assert found.span_s == found.makespan_s == microbatches * sum(costs) + bubble
            assert found.peak_activations == [min(microbatches, ranks)] * ranks


def test_without_ranks_before_it_whole_backwards_are_those_of_1f1b():
    whole = build("zb-h1", ranks=5, microbatches=7, backward="whole")

    assert whole[0] == build("1f1b", ranks=5, microbatches=7)[0]
