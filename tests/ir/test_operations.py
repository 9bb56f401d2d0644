"""The table of operations: one row each, and what follows from the rows."""

from collections import Counter

import pytest

from penstock.ir.operations import (
    BEGINS_KEEPING,
    ENDS_KEEPING,
    IS_COMPUTE,
    IS_COPY,
    MAKES_KEPT,
    NAMES_SLOT,
    OF_STAGE,
    OP_OF_TEXT,
    OPERATIONS,
    Kind,
    Lane,
    Op,
    Size,
)


def ops(flags):
    return [op for op in Op if flags[op]]


@pytest.mark.feature("B14")
def test_every_operation_has_a_row_and_its_own_text_and_name():
    assert set(OPERATIONS) == set(Op)
    assert len(OP_OF_TEXT) == len(Op) == len({operation.name for operation in OPERATIONS.values()})


def test_the_numbers_are_those_of_columns_and_files():
    assert [int(op) for op in Op] == list(range(16))
    assert (Kind.RECOMPUTE, Op.RECOMPUTE, Op.OPTIMIZER_STEP) == (13, 13, 12)


def test_an_operation_has_one_lane():
    assert [op for op in Op if op.is_send] == [Op.SEND_FORWARD, Op.SEND_BACKWARD]
    assert [op for op in Op if op.is_receive] == [Op.RECEIVE_FORWARD, Op.RECEIVE_BACKWARD]
    assert all(
        bool(operation.message) == (operation.lane in (Lane.SEND, Lane.RECEIVE)) for operation in OPERATIONS.values()
    )


@pytest.mark.feature("B14")
def test_whatever_is_read_is_made_and_whatever_is_freed_was_read():
    made = {value for operation in OPERATIONS.values() for value in operation.makes}

    for operation in OPERATIONS.values():
        read = {each.value for each in operation.reads}
        assert read <= made
        assert set(operation.frees) <= read


def test_every_value_of_a_microbatch_is_freed_by_whoever_reads_it():
    readers = [(op, read.value) for op, row in OPERATIONS.items() for read in row.reads if row.lane is not Lane.RECEIVE]

    assert [(op, value) for op, value in readers if value not in OPERATIONS[op].frees and value not in OF_STAGE] == []


def test_the_bytes_of_all_rows_of_a_microbatch_add_up_to_nothing():
    """Of a stage in the middle of a route, whole or split, with a recomputation or without."""
    messages = [Op.RECEIVE_FORWARD, Op.SEND_FORWARD, Op.RECEIVE_BACKWARD, Op.SEND_BACKWARD]
    for rows in (
        [Op.FORWARD, Op.BACKWARD],
        [Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT],
        [Op.FORWARD, Op.OFFLOAD, Op.RELOAD, Op.BACKWARD],
    ):
        left = Counter()
        for op in (*messages, *rows):
            left.update(OPERATIONS[op].at_start)
            left.update(OPERATIONS[op].at_end)
        assert not any(left.values())
    on_host = Counter(OPERATIONS[Op.OFFLOAD].on_host_at_start)
    on_host.update(OPERATIONS[Op.RELOAD].on_host_at_end)
    assert on_host == {Size.ACTIVATION: 0}
    again = OPERATIONS[Op.RECOMPUTE].at_start
    assert again == {Size.ACTIVATION: 1, Size.CHECKPOINT: -1}, "its forward keeps CHECKPOINT, not ACTIVATION"


def test_a_place_is_kept_from_the_forward_to_the_last_part_of_the_backward():
    assert ops(BEGINS_KEEPING) == [Op.FORWARD]
    assert ops(ENDS_KEEPING) == [Op.BACKWARD, Op.BACKWARD_WEIGHT]
    assert ops(MAKES_KEPT) == [Op.FORWARD, *ops(IS_COPY)]
    assert ops(NAMES_SLOT) == [*ops(IS_COMPUTE), *ops(IS_COPY)]
