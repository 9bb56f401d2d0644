"""Reductions and the optimizer step call the hooks of their rank."""

import pytest

from penstock.execute.compile.collectives import compile_collective
from penstock.ir.operations import Op
from penstock.ir.program import Program
from penstock.lowering import lower
from penstock.schedules import build
from tests.compiled import context_of, row_of


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (Op.REDUCE_GRADIENT, [("reduce stage", 1)]),
        (Op.REDUCE_TIED, [("reduce tied", 0)]),
        (Op.OPTIMIZER_STEP, [("optimizer step",)]),
    ],
)
def test_each_row_calls_its_hook_with_its_stage_or_group(op, expected):
    program = lower(build("gpipe", ranks=2, microbatches=1), tied_groups=[(0, 1)], optimizer_step=True)
    row = next(row for row in range(*program.offsets[1:3]) if program.op[row] == op)
    said = []

    [bound] = compile_collective(context_of(program, 1, said), row)
    bound.call(None)

    assert said == expected


def test_gathering_and_dropping_parameters_is_nothing():
    program = Program.from_csv("0UNSHARD,0F0,0B0,0RESHARD\n")
    said = []

    for text in ("0UNSHARD", "0RESHARD"):
        [bound] = compile_collective(context_of(program, 0, said), row_of(program, text))
        bound.call(None)

    assert said == []
