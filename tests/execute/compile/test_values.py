"""Values stay on their rank or travel, as the program says; each is taken once."""

import pytest
import torch

from penstock.errors import PipelineError
from penstock.execute.compile.values import put_gradients, put_outputs, take_gradients, take_inputs
from penstock.lowering import lower
from penstock.placement import Placement
from penstock.schedules import build
from tests.compiled import context_of, row_of, step_for
from tests.execute.test_run import drawn

LOCAL = lower(drawn(Placement.explicit([0, 0]), "0F0 1F0 1B0 0B0"))


def test_outputs_and_gradients_of_a_stage_on_this_rank_stay_here():
    said = []
    context = context_of(LOCAL, 0, said)
    step, value = step_for(context), torch.ones(2, requires_grad=True)

    put_outputs(context, row_of(LOCAL, "0F0"))(step, value)
    take, waits = take_inputs(context, row_of(LOCAL, "1F0"))
    [found] = take(step)
    put_gradients(context, row_of(LOCAL, "1B0"))(step, ["gradient"])

    assert waits == ()
    assert said == [("note_outputs", (0, 0, 0), value, "0F0")]
    assert found.is_leaf
    assert found.requires_grad
    assert torch.equal(found, value)
    assert take_gradients(context, row_of(LOCAL, "0B0"))[0](step) == ["gradient"]
    assert step.local == {}


def test_an_output_that_was_changed_meanwhile_is_refused():
    context = context_of(LOCAL)
    step, value = step_for(context), torch.ones(2)
    put_outputs(context, row_of(LOCAL, "0F0"))(step, value)

    value += 1

    with pytest.raises(PipelineError, match="0F0: a tensor of its output was changed in place"):
        take_inputs(context, row_of(LOCAL, "1F0"))[0](step)


def test_a_message_that_has_come_is_taken_once_and_releases_what_has_arrived():
    program, said = lower(build("1f1b", ranks=2, microbatches=2)), []
    context = context_of(program, 0, said)
    step, receive = step_for(context), row_of(program, "0RECV_B1")
    slot = program.slot[receive]
    step.received[slot] = "posted"

    take, [wait] = take_gradients(context, row_of(program, "0B1"))
    wait.call(step)

    assert said == [("take_gradients", "posted"), ("release", 1, 2)]
    assert step.received[slot] is None
    assert take(step) == "take_gradients"
    assert step.inputs[slot] is None


def test_at_both_ends_of_a_route_nothing_is_put_anywhere():
    context = context_of(LOCAL)
    step = step_for(context)

    put_outputs(context, row_of(LOCAL, "1F0"))(step, "outputs")
    put_gradients(context, row_of(LOCAL, "0B0"))(step, "gradients")

    assert step.local == {}
    assert take_gradients(context, row_of(LOCAL, "1B0"))[0](step) == ()
