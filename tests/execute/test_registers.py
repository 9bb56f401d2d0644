"""The registers of a rank are as many as its program has slots, and what is left in them has a name."""

import pytest

from penstock.execute.registers import Registers
from penstock.execute.stages.carried import Trail
from penstock.ir.instruction import Op
from penstock.lowering import lower
from penstock.schedules import build

PROGRAM = lower(build("1f1b", ranks=3, microbatches=4))
ROWS = range(int(PROGRAM.offsets[1]), int(PROGRAM.offsets[2]))


def row_of(text):
    return next(row for row in ROWS if str(PROGRAM.instruction(row)) == text)


def test_there_is_a_place_for_every_slot():
    registers = Registers.for_rows(PROGRAM, ROWS)

    for column, op in [(registers.saved, Op.FORWARD), (registers.outgoing, Op.SEND_FORWARD)]:
        slots = {int(PROGRAM.slot[row]) for row in ROWS if PROGRAM.op[row] == op}
        assert slots <= set(range(len(column)))
    assert len(registers.saved) == 2  # the middle rank of 3 keeps two activations
    assert len(registers.inputs) == len(registers.received) > 0
    assert registers.leftovers() == 0


@pytest.mark.parametrize(
    ("column", "left_by", "name"),
    [
        ("saved", "1F3", "saved activation of 1F3"),
        ("received", "1RECV_B3", "received message of 1RECV_B3"),
        ("inputs", "1RECV_B3", "received message of 1RECV_B3"),
        ("outgoing", "1SEND_B3", "unsent message of 1SEND_B3"),
    ],
)
def test_what_is_left_is_named_by_the_instruction_that_left_it(column, left_by, name):
    registers = Registers.for_rows(PROGRAM, ROWS)

    getattr(registers, column)[PROGRAM.slot[row_of(left_by)]] = "something"

    assert registers.leftovers() == 1
    assert list(registers.name_leftovers(PROGRAM, ROWS)) == [name]


def test_what_stays_on_the_rank_is_named_by_its_producer():
    registers = Registers.for_rows(PROGRAM, ROWS)

    registers.handed_on[row_of("1F0")] = "something"

    assert list(registers.name_leftovers(PROGRAM, ROWS)) == ["handed-on output of 1F0"]


def test_what_slices_left_is_named_by_its_stage_and_microbatch():
    registers = Registers.for_rows(PROGRAM, ROWS)

    registers.trails[1, 3] = Trail([])

    assert registers.leftovers() == 1
    assert list(registers.name_leftovers(PROGRAM, ROWS)) == ["what slices of microbatch 3 left on stage 1"]


def test_cleared_registers_hold_nothing_and_keep_their_places():
    registers = Registers.for_rows(PROGRAM, ROWS)
    registers.saved[0] = registers.inputs[0] = registers.handed_on[3] = "something"
    registers.trails[1, 3] = Trail([])

    registers.clear()

    assert registers.leftovers() == 0
    assert registers.saved == [None, None]
