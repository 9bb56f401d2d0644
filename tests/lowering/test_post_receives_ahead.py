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
    groups,
    is_message,
    made,
    message,
)
from tests.support.strategies import feasible_schedules


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
def test_receives_stand_one_computation_ahead_or_behind_their_pairs_last_message_and_all_else_keeps_its_order(schedule):
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
    assert computations(after) == computations(before)
    for rank in range(len(before)):
        for peer in range(len(before)):
            assert between(after, rank, peer) == between(before, rank, peer)
