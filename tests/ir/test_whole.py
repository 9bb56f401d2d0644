"""What is whole of sharded units, and when: weights, and gradients until their reduction is known to be over."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir.operations import Op
from penstock.ir.whole import (
    have_new_gradients,
    is_sharded,
    num_whole,
    peak_whole,
    sums_of_units,
    whole_gradients,
)
from penstock.lowering import lower
from penstock.placement import Placement
from tests.simulation.drawing import sharded
from tests.support.strategies import feasible_schedules


def spans(program):
    """By unit, the texts of the first and the last row that run while it has whole gradients."""
    found = whole_gradients(program)
    rows = zip(found.unit.tolist(), found.begin.tolist(), found.end.tolist(), strict=True)
    return [(unit, str(program.instruction(begin)), str(program.instruction(end))) for unit, begin, end in rows]


SPANS = {
    "until a computation waits for what is gathered behind their reduction": (
        "0UNSHARD 0F0 1UNSHARD 1F0 1B0 1REDUCE_GRAD 1RESHARD 0F1 0B0 0REDUCE_GRAD 0RESHARD 1UNSHARD 0F2 1F1 1B1 "
        "1REDUCE_GRAD 1RESHARD",
        [(0, "0B0", "0F2"), (1, "1B0", "0F2"), (1, "1B1", "1RESHARD")],
    ),
    "not while a pair runs of which one waits for a later gather": (
        "1UNSHARD 1F0 2UNSHARD 1B0 1REDUCE_GRAD 0UNSHARD (2F1;0F2)OVERLAP_F_B 0B2",
        [(0, "0B2", "0B2"), (1, "1B0", "0UNSHARD")],
    ),
    "until a later reduction is awaited": (
        "0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD 0REDUCE_TIED0 0STEP", [(0, "0B0", "0RESHARD")],
    ),
    "to the end of the rank if they are never reduced": (
        "0UNSHARD 0F0 0SEND_F0 0RECV_B0 0B0\n1UNSHARD 1RECV_F0 1F0 1B0 1SEND_B0 1RESHARD",
        [(0, "0B0", "0B0"), (1, "1B0", "1RESHARD")],
    ),
    "never where nobody gathers the stage": (
        "0F0 1UNSHARD 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD", [(1, "1B0", "0REDUCE_GRAD")],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("drawing", "expected"), SPANS.values(), ids=SPANS)
def test_gradients_are_whole(drawing, expected):
    assert spans(sharded(*drawing.splitlines())) == expected


def test_a_unit_is_sharded_with_all_its_stages_and_has_its_gradients_together():
    program = replace(sharded("0UNSHARD 0F0 1F0 1B0 0B0 0REDUCE_GRAD 0RESHARD"), units=((0, 1),))

    assert is_sharded(program).tolist() == [True, True]
    assert spans(program) == [(0, "1B0", "0RESHARD")]


def test_a_reshard_of_what_is_whole_from_the_start_drops_nothing():
    assert num_whole(sharded("0F0 0RESHARD 1UNSHARD 1F0 1RESHARD")).tolist() == [0, 0, 1, 1, 1]


def test_units_are_whole_from_their_gather_to_their_reshard_on_each_rank():
    program = sharded("0UNSHARD 0F0 2UNSHARD 0RESHARD 2F0 2RESHARD 0UNSHARD", "1UNSHARD 1F0 1RESHARD", "3F0")

    assert num_whole(program).tolist() == [1, 1, 2, 2, 1, 1, 1, 1, 1, 1, 0]
    assert peak_whole(program) == [2, 1, 0]
    assert peak_whole(sharded("0F0")) is None


def test_copies_on_one_rank_are_added_up_once_and_stages_of_a_unit_all():
    placement = Placement.explicit([0, 0, 0, 0], routes=[[0, 1], [2, 3]])
    program = sharded("0F0 1F0 2F0 3F0")
    copies = replace(program, placement=placement)

    assert copies.unit_of_stage.tolist() == [0, 1, 0, 1]
    assert sums_of_units(copies, np.array([1, 2, 1, 2])).tolist() == [1, 2, 1, 2]
    assert sums_of_units(replace(program, units=((0, 3),)), np.array([1, 2, 4, 8])).tolist() == [9, 2, 4, 9]


def test_rows_have_new_gradients_since_the_row_before_of_their_unit():
    program = sharded("0UNSHARD 0F0 0F1 0RESHARD 1B0 0UNSHARD 0B0 0RESHARD 0UNSHARD 0RESHARD 0UNSHARD 0W1 0RESHARD")
    drops = np.flatnonzero(program.op == Op.RESHARD)

    assert have_new_gradients(program, drops).tolist() == [False, True, False, True]


@pytest.mark.slow
@given(schedule=feasible_schedules(), residency=st.integers(2, 3))
def test_every_gradient_is_within_a_span_of_its_unit_and_spans_of_a_unit_do_not_overlap(schedule, residency):
    program = lower(schedule, shard="full", residency=residency, optimizer_step=True)
    found = whole_gradients(program)

    makers = np.flatnonzero(np.isin(program.op, (Op.BACKWARD, Op.BACKWARD_WEIGHT)))
    reductions = np.flatnonzero(program.op == Op.REDUCE_GRADIENT)
    assert len(found.unit) == len(reductions)
    for row in makers.tolist():
        unit = program.unit_of_stage[program.stage[row]]
        is_inside = (found.unit == unit) & (found.begin <= row) & (row <= found.end)
        assert np.count_nonzero(is_inside) == 1
    ranks = program.rank_of_row
    assert (ranks[found.begin] == ranks[found.end]).all()
