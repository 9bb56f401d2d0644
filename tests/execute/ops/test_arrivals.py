"""A message is waited for in a call of its own, and taken once."""

from penstock.execute.ops.backward import backward
from penstock.lowering import lower
from penstock.schedules import build
from tests.compiled import context_of, row_of, step_for


def test_a_message_that_has_come_is_taken_once_and_releases_what_has_arrived():
    program, said = lower(build("1f1b", ranks=2, microbatches=2)), []
    context = context_of(program, 0, said)
    step, receive, row = step_for(context), row_of(program, "0RECV_B1"), row_of(program, "0B1")
    step.values[context.keys.message_of(receive)] = "posted"
    step.values[context.keys.kept_by(row)] = "saved"

    wait, compute = backward(context, row)
    wait.call(step)
    assert said == [("take_gradients", "posted"), ("release", 1, 2)]
    compute.call(step)

    assert said[2:] == [("backward", "saved", "take_gradients")]
    assert step.values == {}
