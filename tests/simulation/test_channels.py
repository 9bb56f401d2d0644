"""Messages on links: which rows consumers wait for, their lags, and the queues of serialized links."""

from dataclasses import replace

import pytest

from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import Costs, simulate
from tests.simulation.drawing import ends, starts


@pytest.mark.parametrize(
    ("is_exclusive", "second_s", "arrivals_s", "starts_s"),
    [(False, 1.0, [5, 6], [5, 6]), (True, 3.0, [7, 8], [9, 9])],
)
def test_a_message_waits_until_its_receive_is_posted_where_costs_say_so(is_exclusive, second_s, arrivals_s, starts_s):
    """Stage 1 posts the receive of the third microbatch behind its first forward."""
    program = lower(build("gpipe", ranks=2, microbatches=3))
    costs = Costs.uniform(message_bytes=(2,), bandwidth_bytes_per_s=1.0, is_exclusive=is_exclusive)
    costs = replace(costs, forward_s=(1.0, second_s))

    found = [simulate(program, replace(costs, awaits_receives=awaits)) for awaits in (False, True)]

    assert [ends(timeline)["1RECV_F2"] for timeline in found] == arrivals_s
    assert [starts(timeline)["1F2"] for timeline in found] == starts_s
