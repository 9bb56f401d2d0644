"""A program that never ends under a model: per rank where it stands and what it waits for, and what would help."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.ir.operations import Op
from penstock.lowering import lower
from penstock.lowering.assign_slots import assign_slots
from penstock.placement import Placement
from tests.proofs.tables import assert_refused, edited, find, refusal, rewritten, schedule_of
from tests.proofs.test_transports import APART, HEAD_TO_HEAD, LOOPED, SEND_TOO_LATE


def test_sends_head_to_head_say_which_receive_they_wait_for():
    error = assert_refused(
        HEAD_TO_HEAD,
        (0, 3, "0SEND_F1"),
        "never ends under the transport rendezvous",
        "waits for 1RECV_F1 (rank 1, position 4), while rank 1 is at 1SEND_B0 (rank 1, position 3)",
        transport="rendezvous",
    )
    assert [(v.rank, v.action) for v in error.violations] == [(0, "0SEND_F1"), (1, "1SEND_B0")]


def test_a_send_that_comes_too_late_is_named_with_where_its_rank_stands():
    assert_refused(
        SEND_TOO_LATE,
        (1, 3, "1F0"),
        "never ends under the transport posted",
        "waits for the message of 0SEND_F0 (rank 0, position 5), while rank 0 is at 0B1 (rank 0, position 4)",
        "passes under no other transport",
    )


def test_messages_that_meet_in_the_queue_of_a_pair_are_both_named():
    assert_refused(
        APART,
        (0, 7, "0I0"),
        "waits for the message of 1SEND_B0 (rank 1, position 3), which is held up",
        "0SEND_F1 waits for its other end, but meets 1SEND_B0 (rank 1, position 3) in the queue of the two ranks",
        transport="pair_fifo",
    )


def test_groups_that_wait_for_each_other_are_told_from_rank_to_rank():
    error = assert_refused(
        LOOPED,
        (1, 2, "1F0"),
        "waits for the message of 0SEND_F0 (rank 0, position 2), which is after the open group of 3RECV_F0",
        transport="coalesced",
    )
    assert [(v.rank, v.action) for v in error.violations] == [(0, "3F0"), (1, "1F0"), (2, "2F0")]


def test_a_group_that_another_message_holds_up_names_that_message():
    program = rewritten(
        schedule_of("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"),
        """
        0F0 0SEND_F0 0F1 0RECV_B0 0B0 0SEND_F1 0RECV_B1 0B1
        1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1
        """,
    )
    assert_refused(
        program,
        (1, 2, "1F0"),
        "waits for the message of 0SEND_F0 (rank 0, position 1), which is held up",
        "1RECV_F1 waits for 0SEND_F1 (rank 0, position 5), while rank 0 is at 0B0 (rank 0, position 4)",
        transport="coalesced",
    )


def test_a_pair_that_never_starts_tells_what_its_second_member_waits_for():
    program = rewritten(
        schedule_of("0F0 0F1 0F2 0F3 0I0 0W0 0I1 0W1 0I2 0I3 0W2 0W3\n1F0 1I0 1W0 1F1 1I1 1W1 1F2 1F3 1I2 1I3 1W2 1W3"),
        """
        0F0 0SEND_F0 0F1 0SEND_F1 0F2 0RECV_B0 0SEND_F2 0F3 0I0 0SEND_F3 0W0 0RECV_B1 0I1 0W1 0RECV_B2 0I2 0RECV_B3 0I3 0W2 0W3
        1RECV_F0 1F0 1I0 1SEND_B0 1W0 1RECV_F1 1F1 1I1 1SEND_B1 1W1 1RECV_F2 1F2 1RECV_F3 1F3 1I2 1SEND_B2 1I3 1SEND_B3 1W2 1W3
        """,  # noqa: E501
    )
    joined = np.zeros_like(program.joined)
    joined[find(program, "0F3")[1]] = True
    slots = assign_slots(replace(program, joined=joined))

    assert_refused(slots, (0, 7, "0F3"), "waits for the message of 1SEND_B0", transport="pair_fifo")


@pytest.mark.parametrize("model", ["posted", "rendezvous", "pair_fifo", "coalesced"])
def test_a_collective_says_which_member_has_not_come(model):
    schedule = schedule_of("0F0 2F0 2B0 0B0\n1F0 3F0 3B0 1B0\n4F0 4B0", placement=Placement.explicit([0, 1, 0, 1, 2]))
    program = lower(schedule, tied_groups=[(2, 4)])
    assert {Op.REDUCE_TIED} <= set(program.op.tolist())
    send, reduction = find(program, "2SEND_B0")[1], find(program, "2REDUCE_TIED0")[1]
    early = edited(program, lambda orders: orders[0].insert(send, orders[0].pop(reduction)))
    late = edited(early, lambda orders: orders[2].insert(find(early, "4SEND_B0")[1], orders[2].pop()))

    assert_refused(
        late,
        (2, find(late, "4REDUCE_TIED0")[1], "4REDUCE_TIED0"),
        f"waits for 2REDUCE_TIED0 (rank 0, position {find(late, '2REDUCE_TIED0')[1]}), while rank 0 is at 2B0",
        transport=model,
    )


def test_the_fix_names_the_lowering_and_the_transports_that_the_program_is_fit_for():
    (violation, *_) = refusal(APART, transport="pair_fifo").violations

    assert violation.fix == (
        "Lower its schedule with transport='pair_fifo'; as it is, the program passes under posted, buffered(1)"
    )


def test_every_model_that_fails_is_told():
    problems = " ".join(violation.problem for violation in refusal(APART, transport="all").violations)

    assert all(f"the transport {model}:" in problems for model in ("rendezvous", "pair_fifo", "coalesced"))
    assert "the transport posted:" not in problems
