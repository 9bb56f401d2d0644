"""A context reads the columns of a row."""

from penstock.execute.stages.stage import Stage
from penstock.ir.recompute import with_recompute
from penstock.lowering import lower
from penstock.schedules import build
from tests.support.compiled import context_of, row_of
from tests.support.one_stage import passes_of


def test_a_row_is_read_as_numbers_and_as_text():
    program = lower(build("seq1f1b", ranks=2, microbatches=2, slices=2))
    context, row = context_of(program), row_of(program, "0SEND_F1.1")

    assert context.place(row) == (1, 1)
    assert context.key(row) == (0, 1, 1)
    assert context.peer(row) == 1
    assert context.text(row) == "0SEND_F1.1"


def test_all_forwards_of_a_stage_that_run_again_are_one_objects():
    program = lower(with_recompute(build("1f1b", ranks=1, microbatches=2)))
    context = context_of(program, passes={0: passes_of(Stage(0, {}))})

    first, second = (context.recomputation_of(row_of(program, text)) for text in ("0F0", "0R1"))

    assert first is second
