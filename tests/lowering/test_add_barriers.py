"""A BARRIER on every rank after each step of an untimed walk; the program ends under every model of messages."""

import numpy as np
import pytest
from hypothesis import given

from penstock.errors import ScheduleError
from penstock.ir.instruction import Op
from penstock.ir.transports import MODELS
from penstock.lowering import lower
from penstock.proofs import check
from penstock.schedules import FAMILIES, build
from tests.lowering.programs import drawn, lines, message
from tests.support.strategies import feasible_schedules

ADDED = (Op.BARRIER, Op.REDUCE_GRADIENT)


@pytest.mark.feature("B15")
def test_both_ends_of_a_message_are_in_the_step_in_which_its_maker_ends():
    program = lower(build("1f1b", ranks=2, microbatches=2), barriers=True)

    assert drawn(program) == lines(
        """
        0F0 0SEND_F0 0BARRIER 0F1 0SEND_F1 0BARRIER 0RECV_B0 0BARRIER 0B0 0BARRIER 0BARRIER 0RECV_B1 0BARRIER 0B1 0REDUCE_GRAD 0BARRIER
        1RECV_F0 1BARRIER 1F0 1RECV_F1 1BARRIER 1B0 1SEND_B0 1BARRIER 1F1 1BARRIER 1B1 1REDUCE_GRAD 1BARRIER 1SEND_B1 1BARRIER 1BARRIER
        """  # noqa: E501
    )


def steps_of_messages(program, ops):
    """By message, the number of barriers in front of the rows of some operations."""
    numbers = {}
    for order in map(program.__getitem__, range(len(program))):
        num_barriers = 0
        for row in order:
            num_barriers += row.op is Op.BARRIER
            if row.op in ops:
                numbers[message(row)] = num_barriers
    return numbers


def actions_and_messages(program):
    """The rows of each rank but for reductions, which lie behind other rows where barriers part these."""
    return [[str(row) for row in program[rank] if row.op not in ADDED] for rank in range(len(program))]


@given(schedule=feasible_schedules())
def test_each_rank_has_as_many_barriers_and_no_message_crosses_one(schedule):
    plain, program = lower(schedule, "coalesced"), lower(schedule, barriers=True)

    check(program, transport="all")
    assert actions_and_messages(program) == actions_and_messages(plain)
    num_barriers = np.bincount(program.rank_of_row[program.op == Op.BARRIER], minlength=len(program))
    assert set(num_barriers.tolist()) == {num_barriers[0]}
    assert steps_of_messages(program, (Op.SEND_FORWARD, Op.SEND_BACKWARD)) == steps_of_messages(
        program, (Op.RECEIVE_FORWARD, Op.RECEIVE_BACKWARD)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [{"optimizer_step": True}, {"shard": "full"}, {"shard": "optimizer"}, {"offload": [0]}, {"tied_groups": [(0, -1)]}],
)
def test_every_family_ends_with_whatever_else_is_added(name, options):
    schedule = build(name, ranks=4, microbatches=8)
    if "tied_groups" in options:
        ranks = schedule.placement.rank_of_stage
        options = {"tied_groups": [(0, next(stage for stage, rank in enumerate(ranks) if rank != ranks[0]))]}
    if schedule.is_forward_only and "offload" in options:
        with pytest.raises(ScheduleError, match="no backward"):
            lower(schedule, barriers=True, **options)
        return

    for name in map(str, MODELS):
        check(lower(schedule, barriers=True, **options), transport=name)
