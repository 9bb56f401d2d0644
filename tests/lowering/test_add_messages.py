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


def test_an_order_that_cannot_run_is_refused():
    with pytest.raises(ScheduleError, match="cannot run to its end; check the schedule"):
        add_messages(program_of("0B0 0F0\n1F0 1B0"))


@given(schedule=feasible_schedules())
def test_results_that_leave_their_rank_are_sent_and_received_once_in_time_around_computations_as_they_were(schedule):
    before = Program.from_schedule(schedule)
    program = add_messages(before)
    rows = [(rank, row) for rank in range(len(program)) for row in program[rank]]
    where = program.placement.rank_of_stage

    assert sorted(message(row) for _, row in rows if row.op.is_send) == crossings(schedule)
    assert sorted(message(row) for _, row in rows if row.op.is_receive) == crossings(schedule)
    assert all(rank == where[row.stage] != where[row.peer] for rank, row in rows if is_message(row))
    assert computations(program) == computations(before)
    assert_in_time(program)
