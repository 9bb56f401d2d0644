"""R puts an activation where its forward has put its inputs."""

import penstock as ps
from penstock.execute.ops.recompute import recompute
from penstock.lowering import lower
from penstock.schedules import build
from tests.compiled import context_of, row_of, run_calls, step_for


class Again:
    def run_again(self, step, place, checkpoint):
        return place, checkpoint


def test_a_recomputation_puts_the_activation_in_the_place_of_the_checkpoint():
    program = lower(ps.with_recompute(build("1f1b", ranks=1, microbatches=2)))
    context = context_of(program)
    context.recomputations[0] = Again()
    step, row = step_for(context), row_of(program, "0R1")
    step.values[context.keys.kept_by(row)] = "checkpoint"

    run_calls(recompute(context, row), step)

    assert step.values == {context.keys.kept_by(row): ((1, 0), "checkpoint")}
