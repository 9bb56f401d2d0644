"""STEP calls the hook of the optimizer."""

from penstock.execute.ops.step import optimizer_step
from penstock.lowering import lower
from penstock.schedules import build
from tests.compiled import context_of, row_of, run_calls, step_for

PROGRAM = lower(build("1f1b", ranks=2, microbatches=2), optimizer_step=True)


def test_its_hook_is_called_once():
    said = []
    context = context_of(PROGRAM, 1, said)

    run_calls(optimizer_step(context, row_of(PROGRAM, "1STEP", 1)), step_for(context))

    assert said == [("optimizer step",)]
