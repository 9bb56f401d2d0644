"""Dependencies: every row waits for exactly what the design names."""

import numpy as np
import pytest
from hypothesis import given

from penstock.ir import hot
from penstock.ir.deps import NONE, identities, index_rows, num_identities, predecessors
from penstock.ir.instruction import Op
from penstock.lowering import lower
from penstock.placement import Placement
from penstock.schedules import build
from tests.proofs.tables import schedule_of
from tests.support.strategies import feasible_schedules, needs


def waits(table, text_of_row):
    """text -> texts that it waits for."""
    found = predecessors(table)
    return {
        text_of_row(row): {text_of_row(int(before)) for before in found[row] if before != NONE}
        for row in range(len(found))
    }


def program_waits(program):
    return waits(program, lambda row: str(program.instruction(row)))


def schedule_waits(schedule):
    return waits(schedule, lambda row: str(schedule.action(row)))


def one_rank(order, slices=1):
    """Two stages on one rank."""
    return schedule_of(order, placement=Placement.loop(1, 2), slices=slices)


@given(feasible_schedules())
def test_rows_of_a_schedule_wait_for_what_the_design_says(schedule):
    found = waits(schedule, schedule.action)

    assert found == {action: needs(action, schedule) for action in found}


def test_in_a_program_messages_stand_between_the_ranks():
    found = program_waits(lower(build("gpipe", ranks=2, microbatches=1)))

    assert found["0F0"] == set()
    assert found["0SEND_F0"] == {"0F0"}
    assert found["1RECV_F0"] == {"0SEND_F0"}
    assert found["1F0"] == {"1RECV_F0"}
    assert found["1B0"] == {"1F0"}
    assert found["1SEND_B0"] == {"1B0"}
    assert found["0RECV_B0"] == {"1SEND_B0"}
    assert found["0B0"] == {"0RECV_B0", "0F0"}
    assert found["0REDUCE_GRAD"] == set()


def test_whole_backwards_and_input_parts_are_found_in_one_plane():
    rows = index_rows(one_rank("0F0 1F0 1I0 0B0 1W0"))

    assert rows.plane(Op.BACKWARD).tolist() == [[[3]], [[2]]]
    assert rows.plane(Op.BACKWARD_WEIGHT).tolist() == [[[NONE]], [[4]]]


def test_of_duplicates_the_last_one_is_found():
    assert index_rows(one_rank("0F0 1F0 0F0")).plane(Op.FORWARD).tolist() == [[[2]], [[1]]]


def test_identities_count_slices_within_microbatches_within_stages():
    schedule = one_rank("0F0 0F0.1 0F1 1F1.1", slices=2)

    assert identities(schedule).tolist() == [0, 1, 2, 7]
    assert num_identities(schedule) == 8


def test_numbers_of_a_short_column_multiply_without_overflow():
    schedule = build("1f1b", ranks=200, microbatches=200)

    assert schedule.stage.dtype == np.int16
    assert sorted(set(identities(schedule).tolist())) == list(range(200 * 200))


@given(feasible_schedules())
def test_tables_of_many_blocks_have_the_predecessors_of_one(schedule):
    program = lower(schedule)
    whole = predecessors(program), identities(program)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hot, "BLOCK_ROWS", 3)
        in_blocks = predecessors(program), identities(program)

    assert all(np.array_equal(one, other) for one, other in zip(whole, in_blocks, strict=True))


def test_a_backward_waits_for_its_recomputation_and_that_for_the_forward():
    schedule = one_rank("0F0 1F0 1R0 1B0 0B0")

    found = schedule_waits(schedule)

    assert found["1R0"] == {"1F0"}
    assert found["1B0"] == {"1R0"}
    assert found["0B0"] == {"1B0", "0F0"}
