"""What forwards keep: activations, inputs alone before a recomputation, nothing without a backward."""

import numpy as np

from penstock.ir.keeps import NOTHING, keeps
from penstock.ir.operations import Op, Value
from penstock.ir.program import Program
from penstock.ir.recompute import with_recompute
from penstock.lowering import lower
from penstock.schedules import build


def kept(table, rows=None):
    found = keeps(table, rows)
    first = 0 if rows is None else rows.start
    return {str(table.row(first + index)): Value(int(found[index])) for index in np.flatnonzero(found != NOTHING)}


def test_a_forward_keeps_its_activation_and_nothing_else_keeps_anything():
    assert kept(lower(build("1f1b", ranks=2, microbatches=1))) == {"0F0": Value.ACTIVATION, "1F0": Value.ACTIVATION}


def test_a_forward_that_runs_again_keeps_its_checkpoint():
    schedule = with_recompute(build("seq1f1b", ranks=2, microbatches=1, slices=2), stages=[1])

    assert kept(schedule) == {
        "0F0": Value.ACTIVATION,
        "0F0.1": Value.ACTIVATION,
        "1F0": Value.CHECKPOINT,
        "1F0.1": Value.CHECKPOINT,
    }


def test_one_forward_of_a_stage_may_run_again_and_another_not():
    schedule = with_recompute(build("1f1b", ranks=1, microbatches=2))
    one = schedule.select(np.flatnonzero((schedule.op != Op.RECOMPUTE) | (schedule.microbatch == 0)))

    assert kept(one) == {"0F0": Value.CHECKPOINT, "0F1": Value.ACTIVATION}


def test_the_rows_of_one_rank_are_enough():
    program = lower(with_recompute(build("1f1b", ranks=2, microbatches=2)))

    assert set(kept(program, slice(*program.offsets[1:3].tolist()))) == {"1F0", "1F1"}


def test_without_a_backward_nothing_is_kept():
    assert kept(build("gpipe", ranks=2, microbatches=2, forward_only=True)) == {}


def test_a_copy_moves_what_its_forward_keeps():
    schedule = with_recompute(build("gpipe", ranks=2, microbatches=3), stages=[1])
    found = kept(lower(schedule, offload=[0, 1]))

    assert {text for text, value in found.items() if value is Value.ACTIVATION} == {
        *("0F0", "0F1", "0F2"),
        *("0OFFLOAD0", "0OFFLOAD1", "0OFFLOAD2", "0RELOAD0", "0RELOAD1", "0RELOAD2"),
    }
    assert {text for text, value in found.items() if value is Value.CHECKPOINT} == {
        *("1F0", "1F1", "1F2"),
        *("1OFFLOAD0", "1OFFLOAD1", "1OFFLOAD2", "1RELOAD0", "1RELOAD1", "1RELOAD2"),
    }


def test_a_copy_without_a_backward_moves_what_is_not_there():
    assert kept(Program.from_csv("0F0,0OFFLOAD0", name="forwards")) == {"0OFFLOAD0": Value.ACTIVATION}
