"""The optimizer step ends every rank, unless nothing was trained."""

from hypothesis import given

from penstock.ir.instruction import Op
from penstock.ir.program import Program
from penstock.lowering import add_optimizer_step, place_reductions
from penstock.placement import Placement
from tests.lowering.programs import drawn, lines, program_of
from tests.support.strategies import feasible_schedules


def test_each_rank_has_one_step_named_after_its_first_stage():
    program = program_of("3F0 2F0 2B0 3B0\n0F0 1F0 1B0 0B0", placement=Placement.explicit([1, 1, 0, 0]))

    assert drawn(add_optimizer_step(program)) == lines(
        """
        3F0 2F0 2B0 3B0 2STEP
        0F0 1F0 1B0 0B0 0STEP
        """
    )


@given(schedule=feasible_schedules())
def test_the_step_is_the_last_row_of_each_rank_and_the_others_stay(schedule):
    before = place_reductions(Program.from_schedule(schedule))
    after = add_optimizer_step(before)
    for rank in range(len(before)):
        steps = [row for row in after[rank] if row.op is Op.OPTIMIZER_STEP]
        assert after[rank] == before[rank] + steps
        assert len(steps) == (not schedule.is_forward_only)
