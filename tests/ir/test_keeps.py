"""What forwards keep: activations, inputs alone before a recomputation, nothing without a backward."""

import numpy as np

from penstock.ir.keeps import NOTHING, keeps
from penstock.ir.operations import Value
from penstock.ir.program import Program
from penstock.ir.recompute import with_recompute
from penstock.lowering import lower
from penstock.schedules import build


def kept(table, rows=None):
    found = keeps(table, rows)
    first = 0 if rows is None else rows.start
    return {str(table.row(first + index)): Value(int(found[index])) for index in np.flatnonzero(found != NOTHING)}


def test_a_forward_keeps_its_activation_where_there_is_a_backward_and_nothing_else_keeps_anything():
    assert kept(lower(build("1f1b", ranks=2, microbatches=1))) == {"0F0": Value.ACTIVATION, "1F0": Value.ACTIVATION}
    assert kept(build("gpipe", ranks=2, microbatches=2, forward_only=True)) == {}


def test_the_rows_of_one_rank_are_enough():
    program = lower(with_recompute(build("1f1b", ranks=2, microbatches=2)))

    assert set(kept(program, slice(*program.offsets[1:3].tolist()))) == {"1F0", "1F1"}


def test_a_copy_without_a_backward_moves_what_is_not_there():
    assert kept(Program.from_csv("0F0,0OFFLOAD0", name="forwards")) == {"0OFFLOAD0": Value.ACTIVATION}
