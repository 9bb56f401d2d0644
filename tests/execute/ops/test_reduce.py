"""REDUCE_GRAD asks the layout of its stage."""

from torch import nn

from penstock.execute.ops.reduce import reduce
from penstock.execute.stages.stage import Stage
from penstock.ir.program import Program
from penstock.lowering import lower
from penstock.schedules import build
from tests.compiled import context_of, row_of, run_calls, step_for
from tests.one_stage import passes_of

PROGRAM = lower(build("1f1b", ranks=2, microbatches=2))


def test_its_layout_reduces_once():
    said = []
    context = context_of(PROGRAM, 1, said)

    run_calls(reduce(context, row_of(PROGRAM, "1REDUCE_GRAD", 1)), step_for(context))

    assert said == [("reduce stage", 1)]


def test_copies_of_a_stage_on_one_rank_are_reduced_once_behind_the_later_one():
    program, said, layer = Program.from_csv("0F0,0B0,1F0,1B0,0REDUCE_GRAD,1REDUCE_GRAD"), [], nn.Linear(2, 2)
    passes = {stage: passes_of(Stage(stage, {"0": layer})) for stage in (0, 1)}
    context = context_of(program, 0, said, passes=passes)

    for text in ("0REDUCE_GRAD", "1REDUCE_GRAD"):
        run_calls(reduce(context, row_of(program, text)), step_for(context))

    assert said == [("reduce stage", 1)]
