"""Slots: no two things that are alive at once share one, and there are no more of them than that takes."""

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given

from penstock.ir.instruction import Op
from penstock.ir.program import Program
from penstock.lowering import add_messages, assign_slots, post_receives_ahead
from tests.lowering.programs import (
    computations,
    consumer,
    drawn,
    groups,
    made,
    message,
    program_of,
)
from tests.support.strategies import feasible_schedules

ACTIVATION, RECEIVE, SEND = "activation", "receive", "send"
FREES_ACTIVATION = (Op.BACKWARD, Op.BACKWARD_WEIGHT)


class Replay:
    """One rank run group by group: what is alive in which slot, and the most that was."""

    def __init__(self, program, rank):
        self.program, self.forward_only = program, program.is_forward_only
        self.rows = program[rank]
        self.sent = {message(row): row.slot for row in self.rows if row.op.is_send}
        self.received = {consumer(row): row.slot for row in self.rows if row.op.is_receive}
        self.alive = {ACTIVATION: {}, RECEIVE: {}, SEND: {}}
        self.peak = dict.fromkeys(self.alive, 0)
        self.used = defaultdict(set)
        for group in groups(program, rank):
            for row in group:
                self.start(row)
            for row in group:
                self.end(row)

    def take(self, pool, slot, what):
        assert slot not in self.alive[pool], f"{pool} slot {slot}: {self.alive[pool]}, now {what}"
        self.alive[pool][slot] = what
        self.used[pool].add(slot)
        self.peak[pool] = max(self.peak[pool], len(self.alive[pool]))

    def start(self, row):
        name = (row.stage, row.microbatch, row.slice)
        if row.op is Op.FORWARD:
            self.take(ACTIVATION, row.slot, name)
        elif row.op.is_compute:
            assert self.alive[ACTIVATION][row.slot] == name
        elif row.op.is_receive:
            self.take(RECEIVE, row.slot, consumer(row))
        elif row.op.is_send:
            assert self.alive[SEND][row.slot] == message(row)
        if row.op.is_compute and row.op is not Op.BACKWARD_WEIGHT and made(row) in self.sent:
            self.take(SEND, self.sent[made(row)], made(row))

    def end(self, row):
        if row.op in FREES_ACTIVATION or (row.op is Op.FORWARD and self.forward_only):
            del self.alive[ACTIVATION][row.slot]
        if row.op.is_send:
            del self.alive[SEND][row.slot]
        elif row.op.is_compute and row.op is not Op.BACKWARD_WEIGHT and made(row) in self.received:
            assert self.alive[RECEIVE].pop(self.received[made(row)]) == made(row)


def test_a_program_that_frees_what_it_never_took_is_left_to_the_check():
    program = program_of("0F0 0B0", microbatches=1)

    twice = assign_slots(replace(program, op=program.op * 0 + Op.BACKWARD))

    assert drawn(twice, slots=True) == ["0B0:0 0B0:0"]


@pytest.mark.feature("B16")
@given(schedule=feasible_schedules())
def test_nothing_alive_is_overwritten_and_no_slot_is_wasted(schedule):
    for passes in ((add_messages,), (add_messages, post_receives_ahead)):
        program = Program.from_schedule(schedule)
        for each in passes:
            program = each(program)
        program = assign_slots(program)
        for rank in range(len(program)):
            replay = Replay(program, rank)
            assert replay.alive == {ACTIVATION: {}, RECEIVE: {}, SEND: {}}
            assert {pool: set(range(peak)) for pool, peak in replay.peak.items()} == {
                pool: replay.used[pool] for pool in replay.peak
            }


@given(schedule=feasible_schedules())
def test_only_slots_change(schedule):
    before = post_receives_ahead(add_messages(Program.from_schedule(schedule)))
    after = assign_slots(before)

    assert drawn(after) == drawn(before)
    assert computations(after) == computations(before)
    assert assign_slots(after) == after
