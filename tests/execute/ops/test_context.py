"""A context reads the columns of a row."""

from penstock.lowering import lower
from penstock.schedules import build
from tests.compiled import context_of, row_of


def test_a_row_is_read_as_numbers_and_as_text():
    program = lower(build("seq1f1b", ranks=2, microbatches=2, slices=2))
    context, row = context_of(program), row_of(program, "0SEND_F1.1")

    assert context.place(row) == (1, 1)
    assert context.key(row) == (0, 1, 1)
    assert context.peer(row) == 1
    assert context.text(row) == "0SEND_F1.1"
    assert context.slot(row) == program.slot[row]
