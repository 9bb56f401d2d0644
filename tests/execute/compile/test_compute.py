"""Each computation works on what its row says, and leaves what it makes for the next row."""

import pytest
import torch

import penstock as ps
from penstock.errors import PipelineError
from penstock.execute.compile.compute import (
    compile_backward,
    compile_backward_weight,
    compile_forward,
    compile_recompute,
)
from penstock.execute.stages.recompute import Checkpoint, RecomputedPasses
from penstock.lowering import lower
from penstock.placement import Placement
from penstock.schedules import build
from tests.compiled import SayingPasses, context_of, row_of, step_for
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
    assert step.made[row].value == "outputs"


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
    assert step.made == step.received == {}  # a last stage has nobody to send to


def test_a_whole_backward_frees_its_activation_when_it_has_run():
    program, said = lower(build("1f1b", ranks=2, microbatches=2)), []
    context = context_of(program, 1, said)
    step, row = step_for(context), row_of(program, "1B0", 1)
    step.saved[program.slot[row]] = "saved"

    run(compile_backward(context, row), step)

    assert said == [("backward", "saved", ())]
    assert step.saved == {}
    assert step.made == {row: "gradients"}


def test_the_first_part_of_a_backward_leaves_what_the_second_needs():
    program, said = lower(build("zb-h1", ranks=2, microbatches=2)), []
    context = context_of(program, 1, said)
    step, first = step_for(context), row_of(program, "1I0", 1)
    slot = program.slot[first]
    step.saved[slot] = "saved"

    run(compile_backward(context, first), step)
    assert step.saved[slot] == "saved"
    run(compile_backward_weight(context, row_of(program, "1W0", 1)), step)

    assert said == [("backward input", "saved", ()), ("backward weight", "saved")]
    assert step.saved == {}


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


class Giving(SayingPasses):
    """Returns the same outputs from every forward."""

    def __init__(self, outputs, said):
        super().__init__(said)
        self._outputs = outputs

    def forward(self, step, place, inputs, keywords):
        super().forward(step, place, inputs, keywords)
        return self._outputs, "saved"


def local_stages(outputs):
    """Return what compiles rows of `LOCAL` whose stages return these outputs, what runs them, and what is said."""
    said = []
    passes = Giving(outputs, said)
    context = context_of(LOCAL, 0, said, passes={0: passes, 1: passes})
    step = step_for(context)

    def run_row(compile_row, text):
        run(compile_row(context, row_of(LOCAL, text)), step)

    return run_row, step, said


def test_outputs_and_gradients_of_a_stage_on_this_rank_stay_here():
    value = torch.ones(2, requires_grad=True)
    run_row, step, said = local_stages(value)

    run_row(compile_forward, "0F0")
    assert said[1:] == [("note_outputs", (0, 0, 0), value, "0F0")]
    run_row(compile_forward, "1F0")
    [(_, _, [found], _)] = said[2:]
    assert (found.is_leaf, found.requires_grad) == (True, True)
    assert torch.equal(found, value)

    assert step.made == {}  # a last stage has nobody to make outputs for, and nothing comes to its backward
    run_row(compile_backward, "1B0")
    run_row(compile_backward, "0B0")
    assert said[3:] == [("backward", "saved", ()), ("backward", "saved", "gradients")]
    assert step.made == step.saved == {}  # nor has a first stage anybody to make gradients for


def test_an_output_that_was_changed_meanwhile_is_refused():
    value = torch.ones(2)
    run_row, _, _ = local_stages(value)
    run_row(compile_forward, "0F0")

    value += 1

    with pytest.raises(PipelineError, match="0F0: a tensor of its output was changed in place"):
        run_row(compile_forward, "1F0")


def test_a_message_that_has_come_is_taken_once_and_releases_what_has_arrived():
    program, said = lower(build("1f1b", ranks=2, microbatches=2)), []
    context = context_of(program, 0, said)
    step, receive, row = step_for(context), row_of(program, "0RECV_B1"), row_of(program, "0B1")
    step.received[program.slot[receive]] = "posted"
    step.saved[program.slot[row]] = "saved"

    wait, backward = compile_backward(context, row)
    wait.call(step)
    assert said == [("take_gradients", "posted"), ("release", 1, 2)]
    backward.call(step)

    assert said[2:] == [("backward", "saved", "take_gradients")]
    assert step.received == {}
