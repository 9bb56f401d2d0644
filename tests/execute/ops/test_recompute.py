"""R puts an activation where its forward has put its inputs."""

import pytest

import penstock as ps
from penstock.errors import PipelineError
from penstock.execute.ops.recompute import recompute
from penstock.execute.stages.recompute import Checkpoint, RecomputedPasses
from penstock.lowering import lower
from penstock.schedules import build
from tests.compiled import context_of, row_of, run_calls, step_for


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

    run_calls(recompute(context, row), step)

    assert step.saved[program.slot[row]] == ((1, 0), checkpoint)


def test_a_recomputation_of_a_stage_that_keeps_no_inputs_is_refused():
    program = lower(ps.with_recompute(build("1f1b", ranks=1, microbatches=1)))
    context = context_of(program)

    with pytest.raises(PipelineError, match="0F0: its forward keeps no inputs"):
        list(recompute(context, row_of(program, "0R0")))
