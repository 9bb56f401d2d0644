"""The costs of messages, by the stage that sends them and their direction."""

import pytest

from penstock.errors import ConfigError
from penstock.placement import Placement
from penstock.simulation import Costs
from penstock.simulation.costs.costs import Channel
from penstock.simulation.costs.messages import BACKWARD, FORWARD, message_costs


@pytest.mark.parametrize("placement", [Placement.bidirectional(2), Placement.vee(2)], ids=["bidirectional", "vee"])
def test_nothing_is_sent_where_a_route_ends_nor_between_stages_of_one_rank(placement):
    """Without a bandwidth, bytes take no time."""
    found = message_costs(placement, Costs.uniform(transfer=1.0, message_bytes=(10**12,), is_exclusive=True))

    assert found.latency_s[FORWARD].tolist() == [1, 0, 1, 0]
    assert found.latency_s[BACKWARD].tolist() == [0, 1, 0, 1]
    assert found.is_exclusive.tolist() == found.latency_s.astype(bool).tolist()
    assert not found.wire_s.any()


def test_a_channel_of_a_rank_that_does_not_exist_is_refused():
    costs = Costs.uniform(channels=(Channel(0, 2),), source="costs.toml")

    expected = r"^channels: from rank 0 to rank 2, but there are 2 ranks, 0 to 1 \(in costs.toml\)$"
    with pytest.raises(ConfigError, match=expected):
        message_costs(Placement.line(2), costs)


def test_a_channel_that_differs_counts_for_all_stages_of_its_two_ranks_in_its_direction():
    special = Channel(sender=0, receiver=1, latency_s=5.0, bandwidth_bytes_per_s=2.0, is_exclusive=True)
    costs = Costs.uniform(transfer=1.0, message_bytes=(8,), bandwidth_bytes_per_s=4.0, channels=(special,))

    found = message_costs(Placement.loop(2, 4), costs)

    assert found.latency_s.tolist() == [[5, 1, 5, 0], [0, 1, 5, 1]]  # the gradient of stage 2 goes from rank 0 to 1
    assert found.wire_s.tolist() == [[4, 2, 4, 0], [0, 2, 4, 2]]
    assert found.is_exclusive.tolist() == [[True, False, True, False], [False, False, True, False]]
