"""Messages: one send and one receive per result that leaves its rank, in one order at both ends."""

import pytest
from hypothesis import given

from penstock.errors import ScheduleError
from penstock.ir.program import Program
from penstock.lowering import add_messages
from penstock.placement import Placement
from tests.lowering.programs import (
    assert_in_time,
    computations,
    crossings,
    drawn,
    is_message,
    lines,
    message,
    program_of,
)
from tests.support.strategies import feasible_schedules


def assert_becomes(before, after, **sizes):
    assert drawn(add_messages(program_of(before, **sizes))) == lines(after)


def test_sends_stand_behind_their_action_and_receives_in_front_of_the_first_later_one():
    assert_becomes(
        """
        0F0 0F1 0B0 0B1
        1F0 1B0 1F1 1B1
        """,
        """
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1
        """,
    )


def test_of_two_actions_that_start_together_the_lower_rank_counts_as_earlier():
    upward, downward = Placement.explicit([0, 1]), Placement.explicit([1, 0])
    assert_becomes("0F0 0F1\n1F0 1F1", "0F0 0SEND_F0 0F1 0SEND_F1\n1RECV_F0 1RECV_F1 1F0 1F1", placement=upward)
    assert_becomes("1F0 1F1\n0F0 0F1", "1RECV_F0 1F0 1RECV_F1 1F1\n0F0 0SEND_F0 0F1 0SEND_F1", placement=downward)


def test_messages_of_a_pair_stand_outside_it():
    assert_becomes(
        """
        0F0 0F1 0F2 0B0 0B1 0B2
        1F0 1F1 (1F2;1B0) 1B1 1B2
        2F0 2B0 2F1 (2B1;2F2) 2B2
        """,
        """
        0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2
        1RECV_F0 1RECV_F1 1F0 1SEND_F0 1RECV_F2 1F1 1SEND_F1 1RECV_B0 (1F2;1B0) 1SEND_F2 1SEND_B0 1RECV_B1 1B1 1SEND_B1 1RECV_B2 1B2 1SEND_B2
        2RECV_F0 2RECV_F1 2F0 2B0 2SEND_B0 2RECV_F2 2F1 (2B1;2F2) 2SEND_B1 2B2 2SEND_B2
        """,  # noqa: E501
    )


@pytest.mark.parametrize(
    ("pair", "sends", "receives"),
    [
        ("(0F1;2B0)", "0SEND_F1 2SEND_B0", "1RECV_F1 1RECV_B0"),
        ("(2B0;0F1)", "2SEND_B0 0SEND_F1", "1RECV_B0 1RECV_F1"),
    ],
)
def test_a_pair_sends_to_one_rank_in_the_order_of_its_members(pair, sends, receives):
    before = f"0F0 2F0 {pair} 2F1 0B0 2B1 0B1\n1F0 3F0 3B0 1F1 1B0 3F1 3B1 1B1"

    first, second = drawn(add_messages(program_of(before, placement=Placement.loop(2, 4))))

    assert f"{pair} {sends} " in first
    assert f" {receives} 1F1 " in second


def test_an_order_that_cannot_run_is_refused():
    with pytest.raises(ScheduleError, match="cannot run to its end; check the schedule"):
        add_messages(program_of("0B0 0F0\n1F0 1B0"))


@given(schedule=feasible_schedules())
def test_each_result_that_leaves_its_rank_is_sent_once_and_received_once_and_no_other_is(schedule):
    program = add_messages(Program.from_schedule(schedule))
    rows = [(rank, row) for rank in range(len(program)) for row in program[rank]]
    where = program.placement.rank_of_stage

    assert sorted(message(row) for _, row in rows if row.op.is_send) == crossings(schedule)
    assert sorted(message(row) for _, row in rows if row.op.is_receive) == crossings(schedule)
    assert all(rank == where[row.stage] != where[row.peer] for rank, row in rows if is_message(row))


@given(schedule=feasible_schedules())
def test_around_computations_as_they_were_stand_messages_in_time_and_alike_at_both_ends(schedule):
    before = Program.from_schedule(schedule)
    program = add_messages(before)

    assert computations(program) == computations(before)
    assert_in_time(program)
