"""Parameters are not sharded: gathering and dropping them is nothing."""

from penstock.execute.ops.unshard import reshard, unshard
from penstock.ir.program import Program
from tests.compiled import context_of, row_of, run_calls, step_for

PROGRAM = Program.from_csv("0UNSHARD,0F0,0B0,0RESHARD", name="gathered")


def test_nothing_is_called_and_nothing_is_left():
    said = []
    context = context_of(PROGRAM, 0, said)
    step = step_for(context)

    run_calls([*unshard(context, row_of(PROGRAM, "0UNSHARD")), *reshard(context, row_of(PROGRAM, "0RESHARD"))], step)

    assert said == []
    assert step.values == {}
