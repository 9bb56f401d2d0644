"""Receives are posted one computation ahead, and no message passes another of the same pair of ranks."""

import pytest
from hypothesis import given

from penstock.ir import hot
from penstock.ir.instruction import Op
from penstock.ir.program import Program
from penstock.lowering import add_messages, assign_slots, post_receives_ahead
from penstock.placement import Placement
from penstock.proofs import check
from penstock.schedules import build
from tests.lowering.programs import (
    DEFAULT_ORDER,
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
from tests.strategies import feasible_schedules


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


def test_a_receive_does_not_pass_a_message_of_the_same_pair_of_ranks():
    before = """
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2
        1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2
        """
    after = """
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0RECV_B2 0B1 0B2
        1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2
        """
    assert_becomes(before, after)


def test_a_receive_passes_messages_of_other_pairs_of_ranks():
    before = """
        0F0 0SEND_F0 0F1 0SEND_F1
        1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1
        2RECV_F0 2F0 2RECV_F1 2F1
        """
    after = """
        0F0 0SEND_F0 0F1 0SEND_F1
        1RECV_F0 1RECV_F1 1F0 1SEND_F0 1F1 1SEND_F1
        2RECV_F0 2RECV_F1 2F0 2F1
        """
    assert_becomes(before, after)


def test_a_receive_that_stands_further_in_front_stays():
    drawing = """
        0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2
        1RECV_F0 1RECV_F1 1RECV_F2 1F0 1F1 1F2
        """
    assert_becomes(drawing, drawing)


def test_two_computations_that_run_together_count_as_one():
    before = program_of(
        """
        0F0 0F1 0F2 (0F3;0B0) 0B1 0B2 0B3
        1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
        """
    )

    program = post_receives_ahead(add_messages(before))

    assert drawn(program)[0] == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 (0F3;0B0) 0SEND_F3 0RECV_B1 0RECV_B2 0B1 0RECV_B3 0B2 0B3"
    )


@pytest.mark.parametrize("pair", ["(1F1;0F3)", "(0F3;1F1)"])
def test_the_message_of_a_pair_is_posted_in_front_of_the_computation_before_it(pair):
    order = f"0F0 0F1 0F2 1F0 {pair} 1F2 1F3"
    before = add_messages(program_of(f"{order}\n2F0 2F1 2F2 2F3", placement=Placement.explicit([0, 0, 1])))

    assert computations(post_receives_ahead(before)) == computations(before)
    assert pair in drawn(post_receives_ahead(before))[0].split()


def test_one_rank_has_nothing_to_move():
    program = program_of("0F0 0F1 0B0 0B1")

    assert post_receives_ahead(program) == program


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


@pytest.mark.slow
@given(schedule=feasible_schedules())
def test_the_program_cannot_deadlock_under_any_transport(schedule):
    program = assign_slots(post_receives_ahead(add_messages(Program.from_schedule(schedule))))
    for transport in DEFAULT_ORDER:
        check(program, transport=transport)


@pytest.mark.slow
def test_compiled_and_interpreted_the_result_is_the_same(monkeypatch):
    program = add_messages(Program.from_schedule(build("1f1b", ranks=6, microbatches=60)))
    interpreted = post_receives_ahead(program)

    monkeypatch.setattr(hot, "COMPILE_ABOVE_ROWS", 0)

    assert interpreted != program
    assert post_receives_ahead(program) == interpreted
