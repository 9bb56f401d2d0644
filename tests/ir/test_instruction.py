"""Instructions: their text."""

import pytest

from penstock.ir.instruction import Instruction, Op


@pytest.mark.feature("B14")
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
