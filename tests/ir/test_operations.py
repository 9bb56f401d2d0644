"""The table of operations: one row each, and what follows from the rows."""

import numpy as np
import pytest

from penstock.ir.operations import (
    BEGINS_KEEPING,
    ENDS_KEEPING,
    IS_BACKWARD,
    IS_COMPUTE,
    KIND_INDEX,
    MADE,
    MESSAGES,
    MOVED,
    OP_OF_TEXT,
    OPERATIONS,
    TAKEN,
    At,
    Kind,
    Op,
    Role,
    Value,
    exclusive,
    makers,
    peer_at,
)


def ops(flags):
    return [op for op in Op if flags[op]]


def test_every_operation_has_a_row_and_its_own_text_and_name():
    assert set(OPERATIONS) == set(Op)
    assert len(OP_OF_TEXT) == len(Op) == len({operation.name for operation in OPERATIONS.values()})


def test_the_numbers_are_those_of_columns_and_files():
    assert [int(op) for op in Op] == list(range(14))
    assert (Kind.RECOMPUTE, Op.RECOMPUTE, Op.OPTIMIZER_STEP) == (13, 13, 12)


def test_computations_are_the_kinds_and_have_colors():
    assert ops(IS_COMPUTE) == [Op(kind) for kind in Kind]
    assert [KIND_INDEX[kind] for kind in Kind] == list(range(len(Kind)))
    assert all(bool(OPERATIONS[op].colors) == op.is_compute for op in Op)


def test_an_operation_has_one_role():
    assert [op for op in Op if op.is_send] == [Op.SEND_FORWARD, Op.SEND_BACKWARD]
    assert [op for op in Op if op.is_receive] == [Op.RECEIVE_FORWARD, Op.RECEIVE_BACKWARD]
    assert all(
        bool(operation.message) == (operation.role in (Role.SEND, Role.RECEIVE)) for operation in OPERATIONS.values()
    )


def test_whatever_is_waited_for_is_made_and_whatever_is_kept_is_freed():
    made = {value for operation in OPERATIONS.values() for value in operation.makes}
    freed = {value for operation in OPERATIONS.values() for value in operation.frees}

    assert {wait.value for operation in OPERATIONS.values() for wait in operation.waits} <= made
    assert freed == {Value.ACTIVATION, Value.CHECKPOINT, Value.WGRAD_INPUTS}


def test_whole_and_input_backwards_exclude_each_other_and_recomputation_replaces_the_forward():
    assert [exclusive(op) for op in (Op.BACKWARD, Op.BACKWARD_INPUT, Op.RECOMPUTE)] == [
        Op.BACKWARD,
        Op.BACKWARD,
        Op.RECOMPUTE,
    ]
    assert list(makers(Value.ACTIVATION)) == [Op.RECOMPUTE, Op.FORWARD]


def test_backwards_are_whole_ones_and_parts():
    assert ops(IS_BACKWARD) == [Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT]


def test_a_place_is_kept_from_the_forward_to_the_last_part_of_the_backward():
    assert ops(BEGINS_KEEPING) == [Op.FORWARD]
    assert ops(ENDS_KEEPING) == [Op.BACKWARD, Op.BACKWARD_WEIGHT]


@pytest.mark.parametrize(
    ("index", "value", "maker", "taker"),
    [(0, Value.OUTPUT, Op.FORWARD, Op.FORWARD), (1, Value.INPUT_GRADIENT, Op.BACKWARD_INPUT, Op.BACKWARD)],
)
def test_each_message_is_made_moved_and_taken(index, value, maker, taker):
    send, receive = MESSAGES[value]

    assert MADE[maker] == TAKEN[taker] == MOVED[send] == MOVED[receive] == index
    assert np.flatnonzero(index == MOVED).tolist() == [send, receive]
    assert MADE[Op.RECOMPUTE] == TAKEN[Op.RECOMPUTE] == MADE[Op.BACKWARD_WEIGHT] == -1


def test_messages_go_to_the_neighbor_that_waits_for_them():
    assert [peer_at(op) for op in (Op.SEND_FORWARD, Op.RECEIVE_FORWARD, Op.SEND_BACKWARD, Op.RECEIVE_BACKWARD)] == [
        At.DOWNSTREAM,
        At.UPSTREAM,
        At.UPSTREAM,
        At.DOWNSTREAM,
    ]
