"""`zb-h1`: its order as recorded from its authors' code, and its bubble and memory by their formulas."""

import pytest

from tests.schedules.golden import assert_recorded, built, recorded, sizes
from tests.schedules.timing import timeline


def oldest_first(order):
    """A recorded order with its weight gradients as they were run: the oldest first, whatever the record calls them."""
    words = order.split()
    waiting = iter([word.replace("I", "W") for word in words if "I" in word])
    return " ".join(next(waiting) if "W" in word else word for word in words)


def kinds(order):
    """The letters of an order, with a whole backward as its two parts."""
    return "".join(letter for letter in order.replace("B", "IW") if letter in "FIW")


def test_with_whole_backwards_the_order_is_that_of_the_authors_patch_and_light_list():
    assert_recorded("zb-h1", "zero_bubble", "zbh1_patch", lambda size: {"backward": "whole"})
    for key, ranks in recorded("zero_bubble", "zb1p_light"):
        assert built("zb-h1", key, backward="whole") == [oldest_first(order) for order in ranks], key


def test_with_split_backwards_the_same_kinds_of_work_stand_at_the_same_places():
    for key, ranks in recorded("zero_bubble", "zbh1_patch"):
        if sizes(key)["m"] >= sizes(key)["p"] - 1:
            assert [kinds(order) for order in built("zb-h1", key)] == [kinds(order) for order in ranks], key


@pytest.mark.parametrize("costs", [(1, 1, 1), (10, 12, 8), (18, 18, 9), (6, 4, 4), (1, 2, 0)], ids=str)
def test_bubble_and_memory_are_those_of_the_formulas(costs):
    forward, backward_input, backward_weight = costs
    for ranks in range(1, 7):
        bubble = (ranks - 1) * (forward + backward_input - backward_weight)
        for microbatches in (ranks, ranks + 1, 2 * ranks + 1, 12):
            found = timeline("zb-h1", ranks, microbatches, costs)

            assert found.span_s == found.makespan_s == microbatches * sum(costs) + bubble
            assert found.peak_activations == [min(microbatches, ranks)] * ranks
