"""REDUCE_TIED sums the gradients of its tied group."""

from penstock.execute.ops.tied import reduce_tied
from penstock.lowering import lower
from penstock.schedules import build
from tests.compiled import context_of, row_of, run_calls, step_for

PROGRAM = lower(build("1f1b", ranks=2, microbatches=2), tied_groups=[(0, 1)])


def test_its_copy_is_reduced_once():
    said = []
    context = context_of(PROGRAM, 1, said)

    run_calls(reduce_tied(context, row_of(PROGRAM, "1REDUCE_TIED0", 1)), step_for(context))

    assert said == [("reduce tied", "wires", "store")]
