"""B takes what its forward saved; I leaves for W what W needs."""

from penstock.execute.ops.backward import backward, backward_input
from penstock.lowering import lower
from penstock.schedules import build
from tests.compiled import context_of, row_of, run_calls, step_for


def test_a_whole_backward_frees_its_activation_when_it_has_run():
    program, said = lower(build("1f1b", ranks=2, microbatches=2)), []
    context = context_of(program, 1, said)
    step, row = step_for(context), row_of(program, "1B0", 1)
    step.values[context.keys.kept_by(row)] = "saved"

    run_calls(backward(context, row), step)

    assert said == [("backward", "saved", ())]
    assert step.values == {context.keys.made_by(row): "gradients"}


def test_the_part_for_the_inputs_leaves_what_was_saved_for_the_weights():
    program, said = lower(build("zb-h1", ranks=2, microbatches=2)), []
    context = context_of(program, 1, said)
    step, row = step_for(context), row_of(program, "1I0", 1)
    step.values[context.keys.kept_by(row)] = "saved"

    run_calls(backward_input(context, row), step)

    assert said == [("backward input", "saved", ())]
    assert step.values == {context.keys.kept_by(row): "left", context.keys.made_by(row): "gradients"}
