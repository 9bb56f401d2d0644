"""Reductions: a stage's gradients as soon as they are whole, tied groups at the end in one order on all ranks."""

from dataclasses import replace

import pytest
from hypothesis import given

from penstock.ir.instruction import Op
from penstock.ir.program import Program
from penstock.lowering import add_messages, place_gathers, place_reductions
from penstock.placement import Placement
from tests.lowering.programs import computations, drawn, lines, program_of
from tests.support.strategies import feasible_schedules

BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


def assert_becomes(before, after, **sizes):
    assert drawn(place_reductions(program_of(before, **sizes))) == lines(after)


def test_tied_groups_stand_in_the_order_of_their_index_on_every_rank():
    assert_becomes(
        """
        0F0 2F0 2B0 0B0
        1F0 3F0 3B0 1B0
        """,
        """
        0F0 2F0 2B0 2REDUCE_GRAD 0B0 0REDUCE_GRAD 2REDUCE_TIED0 0REDUCE_TIED1 2REDUCE_TIED2
        1F0 3F0 3B0 3REDUCE_GRAD 1B0 1REDUCE_GRAD 1REDUCE_TIED0 3REDUCE_TIED1 3REDUCE_TIED2
        """,
        placement=Placement.loop(2, 4),
        tied_groups=[(1, 2), (0, 3), (2, 3)],
    )


def test_an_empty_tied_group_adds_nothing_and_keeps_its_index():
    assert_becomes("0F0 0B0", "0F0 0B0 0REDUCE_GRAD 0REDUCE_TIED1", tied_groups=[(), (0,)])


def test_what_has_its_reductions_omits_them_no_longer():
    program = program_of("0F0 0B0")

    assert (program.omits_reductions, place_reductions(program).omits_reductions) == (True, False)
    assert not program_of("0F0").omits_reductions
    assert replace(program, omits_reductions=False) != program


@pytest.mark.feature("E5")
def test_a_stage_that_is_resharded_is_reduced_before_each_reshard_that_would_leave_gradients():
    before = program_of("0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1", placement=Placement.loop(1, 2))

    assert drawn(place_reductions(place_gathers(before, residency=1, look_ahead=0))) == [
        "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1REDUCE_GRAD 1RESHARD 0UNSHARD 0B0 0F1 0REDUCE_GRAD 0RESHARD "
        "1UNSHARD 1F1 1B1 1REDUCE_GRAD 1RESHARD 0UNSHARD 0B1 0REDUCE_GRAD 0RESHARD"
    ]
    assert drawn(place_reductions(place_gathers(before, residency=2, look_ahead=0))) == [
        "0UNSHARD 0F0 1UNSHARD 1F0 1B0 0B0 0F1 1F1 1B1 1REDUCE_GRAD 1RESHARD 0B1 0REDUCE_GRAD 0RESHARD"
    ]


def test_an_input_gradient_alone_leaves_nothing_to_reduce():
    before = program_of("0F0 1F0 1I0 0I0 1W0 0W0", placement=Placement.loop(1, 2))

    (line,) = drawn(place_reductions(place_gathers(before, residency=1, look_ahead=0)))

    assert line.endswith("0UNSHARD 0I0 0RESHARD 1UNSHARD 1W0 1REDUCE_GRAD 1RESHARD 0UNSHARD 0W0 0REDUCE_GRAD 0RESHARD")
    assert line.count("REDUCE_GRAD") == 2


def test_a_stage_that_stays_whole_is_reduced_behind_its_last_backward():
    program = Program.from_csv("0F0\n1UNSHARD,1F0,1B0,1RESHARD,1UNSHARD,1F1,1B1,1SEND_B1", name="stays")

    assert drawn(place_reductions(program))[1] == (
        "1UNSHARD 1F0 1B0 1REDUCE_GRAD 1RESHARD 1UNSHARD 1F1 1B1 1SEND_B1 1REDUCE_GRAD"
    )


def test_stages_of_a_unit_are_reduced_once_behind_the_last_of_them():
    program = replace(Program.from_csv("0UNSHARD,0F0,1F0,1B0,0B0,0RESHARD", name="unit"), units=((0, 1),))

    assert drawn(place_reductions(program)) == ["0UNSHARD 0F0 1F0 1B0 0B0 0REDUCE_GRAD 0RESHARD"]
    alone = Program.from_csv("0F0,1F0,1B0,0B0", name="not sharded")
    assert drawn(place_reductions(replace(alone, units=((0, 1),)))) == [
        "0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD"  # each adds what came since the one before it
    ]


@given(schedule=feasible_schedules())
def test_each_stage_with_a_backward_is_reduced_once_behind_all_of_them_and_their_sends_and_nothing_else(schedule):
    before = add_messages(Program.from_schedule(schedule))
    after = place_reductions(before)

    assert computations(after) == computations(before)
    for rank, stages in enumerate(after.placement.stages_of_rank):
        rows = after[rank]
        at = {row.stage: place for place, row in enumerate(rows) if row.op is Op.REDUCE_GRADIENT}
        needed = {row.stage: place for place, row in enumerate(rows) if row.op in BACKWARDS}
        sends = {row.stage: place for place, row in enumerate(rows) if row.op is Op.SEND_BACKWARD}
        assert sum(row.op is Op.REDUCE_GRADIENT for row in rows) == len(needed)
        assert set(at) == set(needed) <= set(stages)
        assert all(at[stage] > max(needed[stage], sends.get(stage, -1)) for stage in needed)
    for rank in range(len(after)):
        rows, begin = after[rank], int(after.offsets[rank])
        for place, row in enumerate(rows):
            if row.op is Op.REDUCE_GRADIENT:
                last = max(at for at, other in enumerate(rows) if other.op in BACKWARDS and other.stage == row.stage)
                between = rows[last + 1 + bool(after.joined[begin + last]) : place]
                assert all(other.op.is_send or other.op is Op.REDUCE_GRADIENT for other in between)
