"""Messages on links: which rows consumers wait for, their lags, and the queues of serialized links."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.ir.deps import NONE, predecessors
from penstock.ir.instruction import Op
from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import Costs, simulate
from penstock.simulation.channels import add_messages
from penstock.simulation.costs.costs import Channel
from penstock.simulation.queues import Queues
from tests.simulation.drawing import drawn, ends, starts

PROGRAM = drawn("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", num_microbatches=2)


def added(costs):
    before, queues = predecessors(PROGRAM)[:, 0].copy(), Queues(PROGRAM)
    return add_messages(PROGRAM, costs, before, queues), before, queues


def named(row):
    return str(PROGRAM.instruction(int(row))) if row < PROGRAM.num_instructions else f"queue {row}"


def waits(before):
    return {named(row): named(source) for row, source in enumerate(before) if source != NONE}


def test_consumers_wait_for_sends_and_receives_for_nothing():
    _, before, _ = added(Costs.uniform())

    assert waits(before) == {
        "0SEND_F0": "0F0", "0SEND_F1": "0F1", "1F0": "0SEND_F0", "1F1": "0SEND_F1",
        "1SEND_B0": "1B0", "1SEND_B1": "1B1", "0B0": "1SEND_B0", "0B1": "1SEND_B1",
    }  # fmt: skip


def test_the_lag_of_what_takes_a_message_is_latency_and_wire_together():
    messages, _, queues = added(Costs.uniform(transfer=0.5, message_bytes=(4,), bandwidth_bytes_per_s=8.0))

    lags_s = {named(row): lag_s for row, lag_s in enumerate(messages.lag_s) if lag_s}
    takers = ["1RECV_F0", "1RECV_F1", "1F0", "1F1", "0RECV_B0", "0RECV_B1", "0B0", "0B1"]
    assert lags_s == dict.fromkeys(takers, 1.0)
    assert queues.next_row == PROGRAM.num_instructions


def test_serialized_links_have_a_queue_each_and_leave_the_others_as_they_are():
    costs = Costs.uniform(transfer=0.5, channels=(Channel(1, 0, latency_s=2.0, is_exclusive=True),))

    messages, before, queues = added(costs)

    first = PROGRAM.num_instructions
    ((sends, wires),) = queues.ended_by_queues
    assert [named(row) for row in sends] == ["1SEND_B0", "1SEND_B1"]
    assert wires.tolist() == [first, first + 1]
    assert queues.next_row == first + 2
    assert {waits(before)[text] for text in ("0B0", "0B1")} == {f"queue {first}", f"queue {first + 1}"}
    assert waits(before)["1F0"] == "0SEND_F0"
    assert set(messages.lag_s[np.isin(PROGRAM.op, (Op.BACKWARD,)) & (PROGRAM.stage == 0)]) == {2.0}


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
