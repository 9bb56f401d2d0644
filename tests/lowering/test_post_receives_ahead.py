"""Receives are posted one computation ahead, and no message passes another of the same pair of ranks."""

import pytest
from hypothesis import given

from penstock.ir.instruction import Op
from penstock.ir.program import Program
from penstock.lowering import add_messages, post_receives_ahead
from tests.lowering.programs import (
    between,
    computations,
    consumer,
    drawn,
    groups,
    is_message,
    lines,
    made,
    message,
    program_of,
    rearranged,
)
from tests.support.strategies import feasible_schedules


def assert_becomes(before, after, **sizes):
    """Add messages to the actions of a drawing, put all in its order, and run the pass."""
    actions = "\n".join(
        " ".join(w for w in line.split() if "SEND" not in w and "RECV" not in w) for line in lines(before)
    )
    program = rearranged(add_messages(program_of(actions, **sizes)), before)

    assert drawn(post_receives_ahead(program)) == lines(after)


@pytest.mark.feature("C6")
def test_a_receive_is_posted_one_computation_ahead_of_its_consumer():
    assert_becomes(
        """
        0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2
        1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2
        """,
        """
        0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0RECV_B1 0B0 0RECV_B2 0B1 0B2
        1RECV_F0 1RECV_F1 1F0 1RECV_F2 1F1 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2
        """,
    )


def places(program, rank):
    """Per message of the rank, (how many computations are before it, the row); joined ones count as one."""
    found, place = [], 0
    for group in groups(program, rank):
        if group[0].op.is_compute:
            place += 1
        elif is_message(group[0]):
            found.append((place, group[0]))
    return found


def consumer_places(program, rank):
    kept = [group for group in groups(program, rank) if group[0].op.is_compute]
    return {made(row): place for place, group in enumerate(kept) for row in group if row.op is not Op.BACKWARD_WEIGHT}


@pytest.mark.feature("C6", "C14", "X9")
@given(schedule=feasible_schedules())
def test_each_receive_stands_one_computation_ahead_or_right_behind_its_pairs_last_message_or_stays(schedule):
    before = add_messages(Program.from_schedule(schedule))
    after = post_receives_ahead(before)
    where = before.placement.rank_of_stage
    for rank in range(len(before)):
        old = {(row.op, message(row)): place for place, row in places(before, rank)}
        needed, last = consumer_places(after, rank), {}
        for place, row in places(after, rank):
            was = old[row.op, message(row)]
            ahead = min(was, needed[consumer(row)] - 1) if row.op.is_receive else was
            assert place == max(ahead, last.get(where[row.peer], 0))
            last[where[row.peer]] = place


@given(schedule=feasible_schedules())
def test_computations_and_the_messages_of_each_pair_of_ranks_keep_their_order(schedule):
    before = add_messages(Program.from_schedule(schedule))
    after = post_receives_ahead(before)

    assert computations(after) == computations(before)
    for rank in range(len(before)):
        for peer in range(len(before)):
            assert between(after, rank, peer) == between(before, rank, peer)
