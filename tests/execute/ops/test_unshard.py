"""UNSHARD and RESHARD ask the layout of the stage."""

from penstock.execute.ops.unshard import reshard, unshard
from penstock.ir.program import Program
from tests.compiled import context_of, row_of, run_calls, step_for

PROGRAM = Program.from_csv("0UNSHARD,0F0,0B0,0RESHARD", name="gathered")


def test_the_layout_gathers_and_drops():
    said = []
    context = context_of(PROGRAM, 0, said)
    step = step_for(context)

    run_calls([*unshard(context, row_of(PROGRAM, "0UNSHARD")), *reshard(context, row_of(PROGRAM, "0RESHARD"))], step)

    assert said == [("unshard",), ("reshard",)]
    assert step.values == {}
