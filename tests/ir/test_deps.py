"""Dependencies: every row waits for exactly what the design names."""

import numpy as np
from hypothesis import given

from penstock.ir.action import parse_action
from penstock.ir.deps import NONE, index_rows, predecessors
from penstock.ir.instruction import Op
from penstock.ir.schedule import Schedule
from penstock.lower import lower
from penstock.placement import Placement
from penstock.schedules import build
from tests.strategies import feasible_schedules, needs


def waits(table, text_of_row):
    """text -> texts that it waits for."""
    found = predecessors(table)
    return {
        text_of_row(row): {text_of_row(int(before)) for before in found[row] if before != NONE}
        for row in range(len(found))
    }


def program_waits(program):
    return waits(program, lambda row: str(program.instruction(row)))


def one_rank(*texts, microbatches=1, slices=1):
    orders = [[parse_action(text) for text in texts]]
    return Schedule.from_actions(
        "drawn", Placement.loop(1, 2), orders, num_microbatches=microbatches, num_slices=slices
    )


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


def test_stages_of_one_rank_wait_for_each_other_without_messages():
    schedule = one_rank("0F0", "1F0", "1I0", "1W0", "0B0")

    found = program_waits(lower(one_rank("0F0", "1F0", "1B0", "0B0")))

    assert found["1F0"] == {"0F0"}
    assert found["0B0"] == {"1B0", "0F0"}
    assert waits(schedule, lambda row: str(schedule.action(row)))["1W0"] == {"1I0"}


def test_a_whole_backward_waits_for_an_input_part():
    schedule = one_rank("0F0", "1F0", "1I0", "0B0", "1W0")

    assert waits(schedule, lambda row: str(schedule.action(row)))["0B0"] == {"1I0", "0F0"}


def test_slices_go_up_in_forwards_and_down_in_backwards():
    texts = ["0F0", "0F0.1", "1F0", "1F0.1", "1B0.1", "1B0", "0B0.1", "0B0"]
    schedule = one_rank(*texts, slices=2)

    found = waits(schedule, lambda row: str(schedule.action(row)))

    assert found["0F0.1"] == {"0F0"}
    assert found["1B0.1"] == {"1F0.1"}
    assert found["0B0"] == {"0F0", "0B0.1", "1B0"}


def test_rows_are_found_by_stage_microbatch_and_slice():
    program = lower(build("1f1b", ranks=2, microbatches=3))

    rows = index_rows(program)

    forward = rows.forward[1, 2, 0]
    assert str(program.instruction(int(forward))) == "1F2"
    assert str(program.instruction(int(rows.send_backward[1, 0, 0]))) == "1SEND_B0"
    assert (rows.weight == NONE).all()
    assert (rows.receive_forward[0] == NONE).all()


def test_ids_outside_the_table_are_left_out_not_an_error():
    schedule = one_rank("0F0", "1F7", "1F0")

    found = predecessors(schedule)

    assert (found[1] == NONE).all()
    assert np.isin(found[2], [0, NONE]).all()


def test_a_missing_action_is_waited_for_by_nobody():
    schedule = one_rank("1F0", "1B0")

    assert waits(schedule, lambda row: str(schedule.action(row))) == {"1F0": set(), "1B0": {"1F0"}}


def test_all_operations_have_their_predecessors_in_range():
    program = lower(build("1f1b", ranks=3, microbatches=4), tied_groups=[(0, 2)], optimizer_step=True)

    found = predecessors(program)

    assert found.shape == (program.num_instructions, 3)
    assert found.max() < program.num_instructions
    collectives = np.isin(program.op, (Op.REDUCE_GRADIENT, Op.REDUCE_TIED, Op.OPTIMIZER_STEP))
    assert (found[collectives] == NONE).all()
