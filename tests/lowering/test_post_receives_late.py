"""Receives move in front of their consumers, and never past another one from the same rank."""

import pytest

from penstock.ir.operations import IS_RECEIVE
from penstock.lowering import lower, post_receives_late
from penstock.proofs import check
from penstock.schedules import FAMILIES, build
from tests.lowering.programs import drawn, lines


def test_a_receive_comes_right_in_front_of_its_consumer():
    program = post_receives_late(lower(build("1f1b", ranks=2, microbatches=3), "coalesced"))

    expected = """
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2 0REDUCE_GRAD
        1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2 1REDUCE_GRAD
        """
    assert drawn(program) == lines(expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_channel_keeps_its_order(family):
    program = lower(build(family, ranks=4, microbatches=8), "coalesced")

    late = post_receives_late(program)

    assert check(late).num_actions == check(program).num_actions
    for rank in range(4):
        assert received(late, rank) == received(program, rank)


def received(program, rank):
    """By the other rank, the receives of a rank in their order."""
    found = {}
    for row in program[rank]:
        if IS_RECEIVE[row.op]:
            found.setdefault(program.placement.rank_of_stage[row.peer], []).append(str(row))
    return found
