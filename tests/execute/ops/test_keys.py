"""Keys are numbers of their own for all that lives between rows, and say what they stand for."""

from penstock.execute.ops.keys import Keys
from penstock.ir.operations import IS_COMPUTE, IS_RECEIVE
from penstock.lowering import lower
from penstock.schedules import build
from tests.support.compiled import row_of

PROGRAM = lower(build("1f1b", ranks=2, microbatches=3))


def test_kinds_of_values_have_keys_apart_and_results_one_a_row():
    keys = Keys(PROGRAM, 1)
    first, end = PROGRAM.offsets[1:3]

    assert keys.activations.start == 0
    assert (keys.activations.stop, keys.messages.stop) == (keys.messages.start, keys.results.start)
    assert len(keys.results) == end - first
    for row in range(first, end):
        assert keys.result_of(row) in keys.results
        if IS_COMPUTE[PROGRAM.op[row]]:
            assert keys.activation_of(row) in keys.activations
        if IS_RECEIVE[PROGRAM.op[row]]:
            assert keys.message_of(row) in keys.messages


def test_a_backward_has_the_key_of_its_forward_which_is_named_by_the_last_instruction_that_filled_it():
    keys = Keys(PROGRAM, 1)
    forward, receive = row_of(PROGRAM, "1F2", 1), row_of(PROGRAM, "1RECV_F2", 1)

    of_first, of_second, of_backward = (
        Keys(PROGRAM, 0).activation_of(row_of(PROGRAM, text)) for text in ("0F0", "0F1", "0B1")
    )
    assert of_first != of_second == of_backward
    assert keys.name(keys.activation_of(forward)) == "saved activation of 1F2"
    assert keys.name(keys.message_of(receive)) == "received message of 1RECV_F2"
    assert keys.name(keys.result_of(forward)) == "result of 1F2"
    assert keys.name(99) == "value 99"
    alone = Keys(lower(build("1f1b", ranks=1, microbatches=1)), 0)
    assert (len(alone.activations), len(alone.messages)) == (1, 0)
