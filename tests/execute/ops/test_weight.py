"""W takes what I has left, and leaves nothing."""

from penstock.execute.ops.weight import weight
from penstock.lowering import lower
from penstock.schedules import build
from tests.compiled import context_of, row_of, run_calls, step_for


def test_the_second_part_of_a_backward_frees_what_the_first_has_left():
    program, said = lower(build("zb-h1", ranks=2, microbatches=2)), []
    context = context_of(program, 1, said)
    step, row = step_for(context), row_of(program, "1W0", 1)
    step.values[context.keys.kept_by(row)] = "saved"

    run_calls(weight(context, row), step)

    assert said == [("backward weight", "saved")]
    assert step.values == {}
