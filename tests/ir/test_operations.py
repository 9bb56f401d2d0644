"""The table of operations: one row each, and what follows from the rows."""

import pytest

from penstock.ir.operations import (
    BEGINS_KEEPING,
    ENDS_KEEPING,
    IS_COMPUTE,
    IS_COPY,
    MAKES_KEPT,
    NAMES_SLOT,
    OP_OF_TEXT,
    OPERATIONS,
    Kind,
    Lane,
    Op,
)


def ops(flags):
    return [op for op in Op if flags[op]]


@pytest.mark.feature("B14")
def test_every_operation_has_a_row_and_its_own_text_and_name():
    assert set(OPERATIONS) == set(Op)
    assert len(OP_OF_TEXT) == len(Op) == len({operation.name for operation in OPERATIONS.values()})


def test_the_numbers_are_those_of_columns_and_files():
    assert [int(op) for op in Op] == list(range(18))
    assert (Kind.RECOMPUTE, Op.RECOMPUTE, Op.OPTIMIZER_STEP) == (13, 13, 12)


def test_an_operation_has_one_lane():
    assert [op for op in Op if op.is_send] == [Op.SEND_FORWARD, Op.SEND_BACKWARD]
    assert [op for op in Op if op.is_receive] == [Op.RECEIVE_FORWARD, Op.RECEIVE_BACKWARD]
    assert all(
        bool(operation.message) == (operation.lane in (Lane.SEND, Lane.RECEIVE)) for operation in OPERATIONS.values()
    )


def test_a_place_is_kept_from_the_forward_to_the_last_part_of_the_backward():
    assert ops(BEGINS_KEEPING) == [Op.FORWARD]
    assert ops(ENDS_KEEPING) == [Op.BACKWARD, Op.BACKWARD_WEIGHT]
    assert ops(MAKES_KEPT) == [Op.FORWARD, *ops(IS_COPY)]
    assert ops(NAMES_SLOT) == [*ops(IS_COMPUTE), *ops(IS_COPY)]
