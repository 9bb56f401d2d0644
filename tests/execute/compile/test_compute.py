"""Each computation works on what its row says, and leaves what it makes for the next row."""

import pytest

import penstock as ps
from penstock.errors import PipelineError
from penstock.execute.compile.compute import (
    compile_backward,
    compile_backward_input,
    compile_backward_weight,
    compile_forward,
    compile_recompute,
)
from penstock.execute.stages.recompute import Checkpoint, RecomputedPasses
from penstock.lowering import lower
from penstock.schedules import build
from tests.compiled import context_of, row_of, step_for


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
    context = context_of(program, recomputed={0: Again()})
    step, row = step_for(context), row_of(program, "0R1")
    checkpoint = step.saved[program.slot[row]] = Checkpoint([], [], [])

    run(compile_recompute(context, row), step)

    assert step.saved[program.slot[row]] == ((1, 0), checkpoint)


def test_a_recomputation_of_a_stage_that_keeps_no_inputs_is_refused():
    program = lower(ps.with_recompute(build("1f1b", ranks=1, microbatches=1)))
    context = context_of(program)
    context = context_of(program, recomputed=context.passes)

    with pytest.raises(PipelineError, match="0F0: its forward keeps no inputs"):
        list(compile_recompute(context, row_of(program, "0R0")))
