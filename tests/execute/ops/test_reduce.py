"""REDUCE_GRAD calls the hook of its stage."""

from penstock.execute.ops.reduce import reduce
from penstock.lowering import lower
from penstock.schedules import build
from tests.compiled import context_of, row_of, run_calls, step_for

PROGRAM = lower(build("1f1b", ranks=2, microbatches=2))


def test_its_hook_is_called_once():
    said = []
    context = context_of(PROGRAM, 1, said)

    run_calls(reduce(context, row_of(PROGRAM, "1REDUCE_GRAD", 1)), step_for(context))

    assert said == [("reduce stage", 1)]
