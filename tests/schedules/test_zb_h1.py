"""`zb-h1`: its order as recorded from its authors' code, and its bubble and memory by their formulas."""

import pytest

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


@pytest.mark.parametrize(("key", "ranks"), PATCH)
def test_with_whole_backwards_the_order_is_that_of_the_authors_patch(key, ranks):
    assert built("zb-h1", key, backward="whole") == ranks


@pytest.mark.parametrize(("key", "ranks"), recorded("zero_bubble", "zb1p_light"))
def test_with_whole_backwards_the_order_is_what_the_authors_light_list_runs(key, ranks):
    assert built("zb-h1", key, backward="whole") == [oldest_first(order) for order in ranks]


@pytest.mark.parametrize(("key", "ranks"), [case for case in PATCH if sizes(case.id)["m"] >= sizes(case.id)["p"] - 1])
def test_with_split_backwards_the_same_kinds_of_work_stand_at_the_same_places(key, ranks):
    assert [kinds(order) for order in built("zb-h1", key)] == [kinds(order) for order in ranks]


@pytest.mark.parametrize("costs", [(1, 1, 1), (10, 12, 8), (18, 18, 9), (6, 4, 4), (1, 2, 0)], ids=str)
def test_bubble_and_memory_are_those_of_the_formulas(costs):
    forward, backward_input, backward_weight = costs
    for ranks in range(1, 7):
        bubble = (ranks - 1) * (forward + backward_input - backward_weight)
        for microbatches in (ranks, ranks + 1, 2 * ranks + 1, 12):
            found = timeline("zb-h1", ranks, microbatches, costs)

            assert found.span_s == found.makespan_s == microbatches * sum(costs) + bubble
            assert found.peak_activations == [min(microbatches, ranks)] * ranks
