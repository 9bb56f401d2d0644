"""Layers share what their stage costs, and add up to it again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.simulation import Costs
from penstock.simulation.costs.costs import Channel
from penstock.simulation.costs.layer_estimate import costs_of_parts, costs_per_layer

PARTS = (range(0, 2), range(2, 5))


def test_layers_share_by_weight():
    per_layer = costs_per_layer(Costs(forward_s=(4.0, 6.0)), PARTS, (1, 3, 1, 1, 4))

    assert per_layer.forward_s == (1.0, 3.0, 1.0, 1.0, 4.0)
    assert per_layer.backward_s == ()


def test_layers_without_weight_share_equally():
    per_layer = costs_per_layer(Costs(forward_s=(4.0, 6.0)), PARTS, (0, 0, 1, 1, 0))

    assert per_layer.forward_s == (2.0, 2.0, 3.0, 3.0, 0.0)


def test_two_copies_of_a_layer_give_their_mean():
    parts = (range(0, 1), range(1, 2), range(0, 1), range(1, 2))

    assert costs_per_layer(Costs(forward_s=(1.0, 2.0, 3.0, 6.0)), parts, (1, 1)).forward_s == (2.0, 4.0)


def test_a_layer_sends_what_its_stage_sends_and_those_of_a_last_stage_what_it_receives():
    per_layer = costs_per_layer(Costs(forward_s=(1.0,), message_bytes=(8, 0)), PARTS, (1,) * 5)

    assert per_layer.message_bytes == (8,) * 5
    assert costs_of_parts(per_layer, (range(0, 1), range(1, 5))).message_bytes == (8, 8)


def test_what_belongs_to_no_layer_stays():
    channel = Channel(0, 1, 0.5)

    per_layer = costs_per_layer(Costs(forward_s=(1.0,), launch_s=0.1, channels=(channel,)), PARTS, (1,) * 5)

    assert (per_layer.launch_s, per_layer.channels) == (0.1, (channel,))


@given(st.data())
def test_the_same_split_costs_the_same_again(data):
    counts = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    ends = [sum(counts[: place + 1]) for place in range(len(counts))]
    parts = tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))
    seconds = st.tuples(*[st.floats(0, 9)] * len(parts))
    costs = Costs(forward_s=data.draw(seconds), backward_s=data.draw(seconds))
    weights = data.draw(st.lists(st.floats(0, 3), min_size=ends[-1], max_size=ends[-1]))

    found = costs_of_parts(costs_per_layer(costs, parts, weights), parts)

    assert found.forward_s == pytest.approx(costs.forward_s)
    assert found.backward_s == pytest.approx(costs.backward_s)
