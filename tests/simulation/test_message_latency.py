"""A message that was there before it was looked for arrives when it usually does; an awaited one when it came."""

from dataclasses import replace

import numpy as np

from penstock.ir.instruction import Op
from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import Costs, simulate
from penstock.simulation.causes import Cause, idle_times
from penstock.simulation.costs.fit import costs_from_timeline
from penstock.simulation.critical import critical_path
from penstock.simulation.message_latency import Transfers, message_latency_s, robust_mean, with_true_arrivals
from tests.simulation.blocking import with_blocking_reductions
from tests.simulation.drawing import drawn, later, row_of, sharded
from tests.simulation.slow_data import with_slow_data

COSTS = Costs(forward_s=(1.0, 2.0), backward_s=(3.0,), latency_s=0.25)


def measured(costs=COSTS, ranks=2, microbatches=6, notice_s=0.0):
    """A simulated step as ranks would note it: an arrival not before the rank looks for it, and a bit later."""
    timeline = simulate(lower(build("1f1b", ranks=ranks, microbatches=microbatches)), costs)
    transfers = Transfers.of(timeline.program)
    end_s = timeline.end_s.copy()
    end_s[transfers.receives] = np.maximum(end_s[transfers.receives], transfers.idle_from_s(timeline) + notice_s)
    start_s = np.array(timeline.start_s)
    start_s[transfers.consumers] = np.maximum(start_s[transfers.consumers], end_s[transfers.receives])
    return replace(timeline, source="measured", end_s=end_s, start_s=start_s), timeline


def test_the_latency_is_that_of_messages_that_were_awaited():
    """Rank 1 is the slower one: it waits for its first input only, and rank 0 for the gradients."""
    noted, _ = measured()
    transfers = Transfers.of(noted.program)

    assert 0 < transfers.is_awaited(noted).sum() < len(transfers.sends)
    assert set(message_latency_s([noted], transfers).tolist()) == {0.25}
    assert (transfers.duration_s(noted)[~transfers.is_awaited(noted)] > 0.25).any()


def test_the_robust_mean_leaves_out_outliers():
    for seconds, mean_s in (([1, 2, 3, 2, 100], 2.0), ([1, 1, 1, 5], 1.0), ([1, 1, 1, 2, 2], 1.4), ([7], 7.0)):
        assert robust_mean(np.array(seconds, float)) == mean_s


def test_without_an_awaited_message_no_time_is_known():
    noted, _ = measured(replace(COSTS, latency_s=0.0))
    transfers = Transfers.of(noted.program)
    late = later(noted, np.where(noted.program.rank_of_row == 1, 100.0, 0.0))
    is_forward = noted.program.op[transfers.sends] == Op.SEND_FORWARD

    assert not transfers.is_awaited(late)[is_forward].any()
    assert message_latency_s([late], transfers)[is_forward].max() < 1.0


def test_a_message_is_awaited_beside_a_reduction_and_not_within_one_that_holds_its_rank_up():
    program = sharded("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1RECV_F1 1F0 1REDUCE_GRAD 1F1")
    costs = Costs(forward_s=(2.0, 1.0), reduce_s=(4.0,), latency_s=0.25)
    beside = replace(simulate(program, costs), source="measured")
    transfers = Transfers.of(program)

    # The second message leaves at 4, and the reduction begins at 3.25.
    assert transfers.is_awaited(beside).tolist() == [True, True]
    assert transfers.is_awaited(with_blocking_reductions(program, costs)).tolist() == [True, False]


def test_a_message_is_awaited_beside_a_gather_of_another_stage_and_not_before_one_of_its_own():
    """The messages leave at 2 and 3. The gather of stage 2, launched at 0, ends at 4; that of stage 1 ends at 8."""
    program = sharded("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 2UNSHARD 1F0 1RECV_F1 1UNSHARD 1F1")
    costs = Costs(forward_s=(2.0, 1.0, 1.0), unshard_s=(0.0, 4.0, 4.0), latency_s=0.25)
    timeline = replace(simulate(program, costs), source="measured")
    transfers = Transfers.of(program)

    assert transfers.idle_from_s(timeline).tolist() == [0.0, 8.0]
    assert transfers.is_awaited(timeline).tolist() == [True, False]


def test_true_arrivals_are_those_that_the_wire_gave():
    noted, true = measured()

    found = with_true_arrivals(noted)

    assert (noted.end_s > true.end_s).any()
    assert np.allclose(found.end_s, true.end_s)
    assert found.start_s.tolist() == noted.start_s.tolist()


def test_a_message_that_came_while_its_receiver_waited_for_data_was_there():
    """Rank 1 looks for the input of 1F1 when it has its data; it left at 2.5, and a quarter second is usual."""
    program = drawn("0F0 0F1", "1F0 1F1", num_microbatches=2)
    costs = Costs(forward_s=(1.25, 1.0), latency_s=0.25)
    row, receive = row_of(program, "1F1"), row_of(program, "1RECV_F1")
    timeline = with_slow_data(program, costs, {row: 2.0})
    end_s = timeline.end_s.copy()
    end_s[receive] = timeline.start_s[row]  # noticed when it was looked for
    noted = replace(timeline, source="measured", end_s=end_s)

    transfers = Transfers.of(program)

    awaited = {
        str(program.instruction(send)): here
        for send, here in zip(transfers.sends, transfers.is_awaited(noted), strict=True)
    }
    assert awaited == {"0SEND_F0": True, "0SEND_F1": False}
    assert (noted.end_s[receive], with_true_arrivals(noted).end_s[receive]) == (4.5, 2.75)


def test_what_a_rank_needs_to_take_a_message_counts_as_no_transfer():
    """Every message is noticed a hundredth after its receiver looks for it, however long it has been there."""
    noted, _ = measured(notice_s=0.01)
    costs = costs_from_timeline(noted)

    def transfer_s(timeline):
        on_path_s = sum(piece.duration_s for piece in critical_path(timeline) if piece.doing == "transfer")
        return on_path_s, idle_times(timeline, costs).total(Cause.TRANSFER)

    (noted_path_s, noted_s), (true_path_s, true_s) = transfer_s(noted), transfer_s(with_true_arrivals(noted))

    assert true_path_s <= 1.0 < noted_path_s
    assert true_s < noted_s
