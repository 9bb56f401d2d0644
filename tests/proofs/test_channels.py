"""Sends and receives that are not the same messages in the same order are refused at both ends."""

import pytest

from penstock.ir.instruction import Op
from penstock.lowering import lower
from penstock.placement import Placement
from penstock.proofs import check
from penstock.schedules import build
from tests.proofs.tables import (
    assert_refused,
    edited,
    find,
    instruction,
    lowered,
    schedule_of,
    swapped,
    without,
)


@pytest.mark.feature("X11")
def test_swapped_sends_are_refused_with_both_places():
    program = lowered("gpipe")
    sends, receives = find(program, "0SEND_F1"), find(program, "1RECV_F0")

    def swap(orders):
        first = orders[0].index(program[0][find(program, "0SEND_F0")[1]])
        orders[0].insert(sends[1], orders[0].pop(first))

    broken = edited(program, swap)
    assert_refused(broken, "0SEND_F1", f"1RECV_F0 (rank 1, position {receives[1]})", "keeps its order", "0SEND_F0")


def test_swapped_receives_are_refused_once_per_channel():
    error = assert_refused(
        swapped(lowered("gpipe", microbatches=4), "1RECV_F0", "1RECV_F1"), (0, 1, "0SEND_F0"), "1RECV_F1 (rank 1"
    )

    assert len([v for v in error.violations if "keeps its order" in v.problem]) == 1


def test_duplicate_messages_are_refused():
    program = lowered()
    rank, position = find(program, "0SEND_F1")
    twice = edited(program, lambda orders: orders[rank].insert(position, orders[rank][position]))

    assert_refused(
        twice, (0, position, "0SEND_F1"), f"moves the same message as 0SEND_F1 (position {position + 1})", "Drop one"
    )


@pytest.mark.feature("C8")
def test_a_message_that_nobody_needs_is_refused_at_both_ends():
    program = lower(build("1f1b", ranks=2, microbatches=2, forward_only=True))

    def exchange_a_gradient(orders):
        orders[1].append(instruction(Op.SEND_BACKWARD, 1, peer=0))
        orders[0].append(instruction(Op.RECEIVE_BACKWARD, 0, peer=1))

    broken = edited(program, exchange_a_gradient)
    assert_refused(broken, (1, len(broken[1]) - 1, "1SEND_B0"), "no action makes or needs", "Drop both")
    assert_refused(broken, (0, len(broken[0]) - 1, "0RECV_B0"), "no action makes or needs")


@pytest.mark.parametrize(("ranks", "expected"), [([0, 0], 0), ([0, 1], 2), ([1, 0], 2)])
def test_results_count_as_messages_where_they_leave_their_rank(ranks, expected):
    stages = [["0F0", "0B0"], ["1F0", "1B0"]]
    text = "0F0 1F0 1B0 0B0" if ranks == [0, 0] else "\n".join(" ".join(stages[stage]) for stage in ranks)

    assert check(schedule_of(text, placement=Placement.explicit(ranks))).num_messages == expected


def with_row(program, rank, row):
    return edited(program, lambda orders: orders[rank].append(row))


ONE_RANK = lower(schedule_of("0F0 1F0 1B0 0B0", placement=Placement.loop(1, 2)))
REFUSED = {
    "a send without its receive": (
        without(lowered(), "1RECV_F1"), "0SEND_F1", ["no receive on rank 1; expected one 1RECV_F1", "Add 1RECV_F1"],
    ),
    "a receive without its send": (
        without(lowered(), "1SEND_B1"), "0RECV_B1", ["no send on rank 1; expected one 1SEND_B1", "Add 1SEND_B1"],
    ),
    "a consumer of what no message brings": (
        without(without(lowered(), "1RECV_F1"), "0SEND_F1"),
        "1F1", ["needs the result of 0F1 (rank 0,", "no message brings it", "Add the send"],
    ),
    "a send before its message is made": (
        swapped(lowered(), "0F1", "0SEND_F1"), "0SEND_F1", ["is before 0F1", "which makes its message", "after 0F1"],
    ),
    "a receive behind its consumer": (
        swapped(lowered("sequential"), "1F0", "1RECV_F0"),
        "1RECV_F0", ["is after 1F0", "which needs its message", "before 1F0"],
    ),
    "a send from the last stage": (
        with_row(lowered(), 1, instruction(Op.SEND_FORWARD, 1, peer=0)), "1SEND_F0", ["stage 1 has no next stage"],
    ),
    "a send to itself": (
        with_row(without(lowered(), "1SEND_B0"), 1, instruction(Op.SEND_BACKWARD, 1, peer=1)),
        "1SEND_B0", ["has stage 1 at its other end; expected stage 0"],
    ),
    "a message to the own rank": (
        with_row(ONE_RANK, 0, instruction(Op.SEND_FORWARD, 0, peer=1)), "0SEND_F0", ["on its own rank", "Drop it"],
    ),
}  # fmt: skip


@pytest.mark.feature("C14")
@pytest.mark.parametrize(("program", "place", "words"), REFUSED.values(), ids=REFUSED)
def test_a_message_that_is_out_of_place_is_refused_there(program, place, words):
    assert_refused(program, place, *words)
