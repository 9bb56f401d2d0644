"""A context reads the columns of a row."""

import penstock as ps
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


def test_only_rows_that_run_again_have_other_passes():
    program = lower(ps.with_recompute(build("1f1b", ranks=1, microbatches=1)))
    context = context_of(program, passes={0: "plain"}, recomputed={0: "recomputed"})

    found = [context.passes_of(row_of(program, text)) for text in ("0F0", "0R0", "0B0")]

    assert found == ["recomputed", "recomputed", "plain"]
