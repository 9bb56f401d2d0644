"""F takes the batch, a message or what another stage of this rank made, and leaves its outputs and what it saved."""

import pytest
import torch

import penstock as ps
from penstock.errors import PipelineError
from penstock.execute.ops.backward import backward
from penstock.execute.ops.forward import forward
from penstock.lowering import lower
from penstock.placement import Placement
from penstock.schedules import build
from tests.compiled import SayingPasses, context_of, row_of, run_calls, step_for
from tests.execute.test_run import drawn


def test_a_forward_of_the_batch_saves_and_puts_its_outputs_out():
    program, said = lower(build("1f1b", ranks=2, microbatches=3)), []
    context = context_of(program, 0, said)
    step, row = step_for(context), row_of(program, "0F1")

    [bound] = forward(context, row)
    bound.call(step)

    assert said[0] == ("forward", (1, 0), ("data 1.0",), {"mask": 1})
    assert step.values[context.keys.kept_by(row)] == "saved"
    assert step.values[context.keys.made_by(row)].value == "outputs"


def test_a_forward_of_a_message_waits_for_it_in_a_call_of_its_own():
    program, said = lower(build("1f1b", ranks=2, microbatches=3)), []
    context = context_of(program, 1, said)
    step, receive = step_for(context), row_of(program, "1RECV_F0", 1)
    step.values[context.keys.message_of(receive)] = "posted"

    wait, compute = forward(context, row_of(program, "1F0", 1))
    assert (wait.awaits, compute.awaits) == (receive, None)
    wait.call(step)
    assert said[0] == ("take_tree", "posted")
    compute.call(step)

    assert said[-1] == ("forward", (0, 0), ("take_tree",), {"mask": 0})
    assert step.values == {context.keys.kept_by(row_of(program, "1F0", 1)): "saved"}  # a last stage sends nothing


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

    def run_row(handler, text):
        run_calls(handler(context, row_of(LOCAL, text)), step)

    return run_row, step, said


def test_outputs_and_gradients_of_a_stage_on_this_rank_stay_here():
    value = torch.ones(2, requires_grad=True)
    run_row, step, said = local_stages(value)

    run_row(forward, "0F0")
    assert said[1:] == [("note_outputs", (0, 0, 0), value, "0F0")]
    run_row(forward, "1F0")
    [(_, _, [found], _)] = said[2:]
    assert (found.is_leaf, found.requires_grad) == (True, True)
    assert torch.equal(found, value)

    # A last stage has nobody to make outputs for, and nothing comes to its backward.
    assert list(step.values.values()) == ["saved", "saved"]
    run_row(backward, "1B0")
    run_row(backward, "0B0")
    assert said[3:] == [("backward", "saved", ()), ("backward", "saved", "gradients")]
    assert step.values == {}  # nor has a first stage anybody to make gradients for


def test_an_output_that_was_changed_meanwhile_is_refused():
    value = torch.ones(2)
    run_row, _, _ = local_stages(value)
    run_row(forward, "0F0")

    value += 1

    with pytest.raises(PipelineError, match="0F0: a tensor of its output was changed in place"):
        run_row(forward, "1F0")


class Checkpointing:
    def forward(self, step, place, inputs, keywords):
        return "outputs", "checkpoint"


def test_a_forward_that_runs_again_keeps_its_inputs_and_another_its_activation():
    program = lower(ps.with_recompute(build("1f1b", ranks=2, microbatches=1), stages=[0]))
    for rank, kept in enumerate(("checkpoint", "saved")):
        context = context_of(program, rank)
        context.recomputations[0] = Checkpointing()
        step, row = step_for(context), row_of(program, f"{rank}F0", rank)
        *_, call = forward(context, row)
        if rank:
            step.values[context.keys.message_of(row_of(program, "1RECV_F0", 1))] = "inputs"
        call.call(step)
        assert step.values[context.keys.kept_by(row)] == kept


def test_a_forward_of_an_evaluation_keeps_nothing():
    context = context_of(lower(build("1f1b", ranks=1, microbatches=1, forward_only=True)))
    step = step_for(context)

    run_calls(forward(context, row_of(context.program, "0F0")), step)

    assert step.values == {}
