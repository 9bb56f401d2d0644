"""Instructions: their table, and their text."""

import pytest

from penstock.ir.action import Kind
from penstock.ir.instruction import INSTRUCTIONS, OP_OF_TEXT, Instruction, Op


def test_every_operation_has_a_row_and_a_text_of_its_own():
    assert set(INSTRUCTIONS) == set(Op)
    assert len(OP_OF_TEXT) == len(Op)


def test_computations_have_the_numbers_and_letters_of_the_kinds():
    assert [op for op in Op if op.is_compute] == [Op(kind) for kind in Kind]
    assert all(INSTRUCTIONS[Op(kind)].text == kind.letter for kind in Kind)


def test_an_operation_is_at_most_one_of_compute_send_and_receive():
    assert all(op.is_compute + op.is_send + op.is_receive <= 1 for op in Op)
    assert [op for op in Op if op.is_send] == [Op.SEND_FORWARD, Op.SEND_BACKWARD]
    assert [op for op in Op if op.is_receive] == [Op.RECEIVE_FORWARD, Op.RECEIVE_BACKWARD]


@pytest.mark.parametrize(
    ("instruction", "text"),
    [
        (Instruction(Op.FORWARD, 2, 1, 0, 2, 5), "2F1"),
        (Instruction(Op.BACKWARD_WEIGHT, 2, 1, 3, 2, 5), "2W1.3"),
        (Instruction(Op.SEND_FORWARD, 3, 1, 0, 4, 0), "3SEND_F1"),
        (Instruction(Op.RECEIVE_FORWARD, 1, 1, 2, 0, 0), "1RECV_F1.2"),
        (Instruction(Op.SEND_BACKWARD, 2, 2, 0, 1, 0), "2SEND_B2"),
        (Instruction(Op.RECEIVE_BACKWARD, 0, 2, 0, 1, 0), "0RECV_B2"),
        (Instruction(Op.UNSHARD, 1, 0, 0, 1, 0), "1UNSHARD"),
        (Instruction(Op.RESHARD, 3, 0, 0, 3, 0), "3RESHARD"),
        (Instruction(Op.REDUCE_GRADIENT, 2, 0, 0, 2, 0), "2REDUCE_GRAD"),
        (Instruction(Op.REDUCE_TIED, 0, 0, 0, 1, 0), "0REDUCE_TIED1"),
        (Instruction(Op.OPTIMIZER_STEP, 0, 0, 0, 0, 0), "0STEP"),
    ],
)
def test_an_instruction_has_its_text(instruction, text):
    assert str(instruction) == text
