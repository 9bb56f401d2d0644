"""Each computation works on what its row says, and leaves what it makes for the next row."""

import pytest
import torch

import penstock as ps
from penstock.errors import PipelineError
from penstock.execute.compile import compute
from penstock.execute.compile.compute import (
    compile_backward,
    compile_backward_input,
    compile_backward_weight,
    compile_forward,
    compile_recompute,
)
from penstock.execute.stages.recompute import Checkpoint, RecomputedPasses
from penstock.lowering import lower
from penstock.placement import Placement
from penstock.schedules import build
from tests.compiled import context_of, row_of, step_for
from tests.execute.test_run import drawn


def run(bounds, step):
    for bound in bounds:
        bound.call(step)


def test_a_forward_of_the_batch_saves_and_puts_its_outputs_out():
    program, said = lower(build("1f1b", ranks=2, microbatches=3)), []
    context = context_of(program, 0, said)
    step, row = step_for(context), row_of(program, "0F1")

    [bound] = compile_forward(context, row)
    bound.call(step)

    assert said[0] == ("forward", (1, 0), ("data 1.0",), {"mask": 1})
    assert step.saved[program.slot[row]] == "saved"
    assert [each.value for each in step.outgoing if each is not None] == ["outputs"]


def test_a_forward_of_a_message_waits_for_it_in_a_call_of_its_own():
    program, said = lower(build("1f1b", ranks=2, microbatches=3)), []
    context = context_of(program, 1, said)
    step, receive = step_for(context), row_of(program, "1RECV_F0", 1)
    step.received[program.slot[receive]] = "posted"

    wait, forward = compile_forward(context, row_of(program, "1F0", 1))
    assert (wait.receive_row, forward.receive_row) == (receive, None)
    wait.call(step)
    assert said[0] == ("take_tree", "posted")
    forward.call(step)

    assert said[-1] == ("forward", (0, 0), ("take_tree",), {"mask": 0})
    assert step.outgoing.count(None) == len(step.outgoing)  # a last stage has nobody to send to


def test_a_whole_backward_frees_its_activation_when_it_has_run():
    program, said = lower(build("1f1b", ranks=2, microbatches=2)), []
    context = context_of(program, 1, said)
    step, row = step_for(context), row_of(program, "1B0", 1)
    step.saved[program.slot[row]] = "saved"

    run(compile_backward(context, row), step)

    assert said == [("backward", "saved", ())]
    assert step.saved == [None] * len(step.saved)
    assert "gradients" in step.outgoing


def test_the_first_part_of_a_backward_leaves_what_the_second_needs():
    program, said = lower(build("zb-h1", ranks=2, microbatches=2)), []
    context = context_of(program, 1, said)
    step, first = step_for(context), row_of(program, "1I0", 1)
    slot = program.slot[first]
    step.saved[slot] = "saved"

    run(compile_backward_input(context, first), step)
    assert step.saved[slot] == "saved"
    run(compile_backward_weight(context, row_of(program, "1W0", 1)), step)

    assert said == [("backward input", "saved", ()), ("backward weight", "saved")]
    assert step.saved[slot] is None


class Again(RecomputedPasses):
    def __init__(self):
        """Without a stage."""

    def recompute(self, step, place, checkpoint):
        return place, checkpoint


def test_a_recomputation_puts_the_activation_in_the_place_of_the_checkpoint():
    program = lower(ps.with_recompute(build("1f1b", ranks=1, microbatches=2)))
    context = context_of(program, passes={0: Again()})
    step, row = step_for(context), row_of(program, "0R1")
    checkpoint = step.saved[program.slot[row]] = Checkpoint([], [], [])

    run(compile_recompute(context, row), step)

    assert step.saved[program.slot[row]] == ((1, 0), checkpoint)


def test_a_recomputation_of_a_stage_that_keeps_no_inputs_is_refused():
    program = lower(ps.with_recompute(build("1f1b", ranks=1, microbatches=1)))
    context = context_of(program)

    with pytest.raises(PipelineError, match="0F0: its forward keeps no inputs"):
        list(compile_recompute(context, row_of(program, "0R0")))


# ---- where values come from and go to

LOCAL = lower(drawn(Placement.explicit([0, 0]), "0F0 1F0 1B0 0B0"))


def test_outputs_and_gradients_of_a_stage_on_this_rank_stay_here():
    said = []
    context = context_of(LOCAL, 0, said)
    step, value = step_for(context), torch.ones(2, requires_grad=True)

    compute._put_outputs(context, row_of(LOCAL, "0F0"))(step, value)
    take, waits = compute._take_inputs(context, row_of(LOCAL, "1F0"))
    [found] = take(step)
    compute._put_gradients(context, row_of(LOCAL, "1B0"))(step, ["gradient"])

    assert waits == ()
    assert said == [("note_outputs", (0, 0, 0), value, "0F0")]
    assert found.is_leaf
    assert found.requires_grad
    assert torch.equal(found, value)
    assert compute._take_gradients(context, row_of(LOCAL, "0B0"))[0](step) == ["gradient"]
    assert step.local == {}


def test_an_output_that_was_changed_meanwhile_is_refused():
    context = context_of(LOCAL)
    step, value = step_for(context), torch.ones(2)
    compute._put_outputs(context, row_of(LOCAL, "0F0"))(step, value)

    value += 1

    with pytest.raises(PipelineError, match="0F0: a tensor of its output was changed in place"):
        compute._take_inputs(context, row_of(LOCAL, "1F0"))[0](step)


def test_a_message_that_has_come_is_taken_once_and_releases_what_has_arrived():
    program, said = lower(build("1f1b", ranks=2, microbatches=2)), []
    context = context_of(program, 0, said)
    step, receive = step_for(context), row_of(program, "0RECV_B1")
    slot = program.slot[receive]
    step.received[slot] = "posted"

    take, [wait] = compute._take_gradients(context, row_of(program, "0B1"))
    wait.call(step)

    assert said == [("take_gradients", "posted"), ("release", 1, 2)]
    assert step.received[slot] is None
    assert take(step) == "take_gradients"
    assert step.inputs[slot] is None


def test_at_both_ends_of_a_route_nothing_is_put_anywhere():
    context = context_of(LOCAL)
    step = step_for(context)

    compute._put_outputs(context, row_of(LOCAL, "1F0"))(step, "outputs")
    compute._put_gradients(context, row_of(LOCAL, "0B0"))(step, "gradients")

    assert step.local == {}
    assert compute._take_gradients(context, row_of(LOCAL, "1B0"))[0](step) == ()
