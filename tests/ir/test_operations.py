"""The table of operations: one row each, and what follows from the rows."""

from collections import Counter

import numpy as np
import pytest

from penstock.ir.collectives import JOINS_RANKS
from penstock.ir.operations import (
    BEGINS_KEEPING,
    ENDS_KEEPING,
    IS_BACKWARD,
    IS_COMPUTE,
    IS_COPY,
    KIND_INDEX,
    MADE,
    MAKES_KEPT,
    MESSAGES,
    MOVED,
    NAMES_SLOT,
    OF_STAGE,
    OP_OF_TEXT,
    OPERATIONS,
    RUNS_AUTOGRAD,
    RUNS_FORWARD,
    TAKEN,
    At,
    Kind,
    Lane,
    Op,
    Size,
    Value,
    exclusive,
    makers,
    peer_at,
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


def test_computations_are_the_kinds_and_have_colors():
    assert ops(IS_COMPUTE) == [Op(kind) for kind in Kind]
    assert [KIND_INDEX[kind] for kind in Kind] == list(range(len(Kind)))
    assert all(bool(OPERATIONS[op].colors) == op.is_compute for op in Op)


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


def test_collectives_and_no_others_join_a_group():
    assert all((row.group is not None) == (row.lane is Lane.COLLECTIVE) for row in OPERATIONS.values())
    assert ops(JOINS_RANKS) == [Op.REDUCE_TIED, Op.OPTIMIZER_STEP]


def test_forwards_and_recomputations_run_layers_and_backwards_but_for_the_weights_run_autograd():
    assert ops(RUNS_FORWARD) == [Op.FORWARD, Op.RECOMPUTE]
    assert ops(RUNS_AUTOGRAD) == [Op.BACKWARD, Op.BACKWARD_INPUT]


def test_whole_and_input_backwards_exclude_each_other_and_recomputation_replaces_the_forward():
    assert [exclusive(op) for op in (Op.BACKWARD, Op.BACKWARD_INPUT, Op.RECOMPUTE)] == [
        Op.BACKWARD,
        Op.BACKWARD,
        Op.RECOMPUTE,
    ]
    assert makers(Value.ACTIVATION) == [Op.RECOMPUTE, Op.RELOAD, Op.FORWARD]


def test_backwards_are_whole_ones_and_parts():
    assert ops(IS_BACKWARD) == [Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT]


def test_a_place_is_kept_from_the_forward_to_the_last_part_of_the_backward():
    assert ops(BEGINS_KEEPING) == [Op.FORWARD]
    assert ops(ENDS_KEEPING) == [Op.BACKWARD, Op.BACKWARD_WEIGHT]
    assert ops(MAKES_KEPT) == [Op.FORWARD, *ops(IS_COPY)]
    assert ops(NAMES_SLOT) == [*ops(IS_COMPUTE), *ops(IS_COPY)]


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
