"""Programs as tables: rows as values, insertion, reordering."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.errors import ScheduleError
from penstock.ir import program as program_module
from penstock.ir.instruction import Instruction, Op
from penstock.ir.program import NewRows, Program
from penstock.lowering import coalesce_messages, lower, post_receives_ahead, post_receives_late
from penstock.placement import Placement
from penstock.schedules import build

SCHEDULE = build("gpipe", ranks=2, microbatches=2)


def texts(program):
    return [[str(instruction) for instruction in program[rank]] for rank in range(program.num_ranks)]


def new_rows(key, rank, op, stage):
    zeros = np.zeros(len(key), np.int32)
    columns = [np.array(values) for values in (rank, op, stage)]
    return NewRows(np.array(key), *columns, zeros, zeros, np.array(stage))


@pytest.mark.feature("B14")
def test_rows_are_values():
    program = Program.from_schedule(SCHEDULE)

    assert program.instruction(5) == Instruction(Op.FORWARD, 1, 1, 0, 1, 0)
    assert program[-1] == program[1]
    assert program.rank_of_row.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (len(program), program.num_stages, program.num_instructions) == (2, 2, 8)
    assert "instructions=8" in repr(program)


def test_stages_that_share_parameters_are_one_unit_and_so_are_copies_on_one_rank():
    schedule = build("looped-bfs", ranks=1, microbatches=1, stages_per_rank=5)
    program = Program.from_schedule(schedule, units=((1, 3), (3, 4)))
    copies = replace(program, placement=Placement.explicit([0] * 5, routes=[[0, 1], [2, 3, 4]]), units=())

    assert program.unit_of_stage.tolist() == [0, 1, 2, 1, 1]
    assert copies.unit_of_stage.tolist() == [0, 1, 0, 1, 4]


def test_units_are_of_one_rank_and_make_another_program():
    program = Program.from_schedule(build("looped-bfs", ranks=1, microbatches=1, stages_per_rank=2))

    with pytest.raises(ScheduleError, match=r"unit \(0, 1\): its stages are on ranks \[0, 1\]"):
        Program.from_schedule(SCHEDULE, units=((0, 1),))
    with pytest.raises(ScheduleError, match=r"unit \(0, 2\): the stages are 0\.\.1"):
        replace(program, units=((0, 2),))
    assert replace(program, units=((0, 1),)) != program
    assert replace(program, units=((0, 1),)).digest() != program.digest()


def test_a_tied_group_names_stages_that_there_are_one_of_each_rank():
    two_per_rank = build("looped-bfs", ranks=2, microbatches=1, stages_per_rank=2)

    with pytest.raises(ScheduleError, match=r"tied group \(0, 2\): the stages are 0\.\.1; name stages among them"):
        Program.from_schedule(SCHEDULE, tied_groups=((0, 2),))
    with pytest.raises(ScheduleError, match=r"tied group \(0, 2\): stages 0 and 2 are on rank 0, where they share"):
        Program.from_schedule(two_per_rank, tied_groups=((0, 2),))


@pytest.mark.parametrize("number", [3, program_module._MANY + 1])
def test_few_rows_are_inserted_as_many_are(number):
    program = Program.from_schedule(build("gpipe", ranks=1, microbatches=8000))
    chance = np.random.default_rng(0)
    rows = np.sort(chance.integers(0, program.num_rows, number))
    zeros = np.zeros(number, np.int64)
    ops, stages = np.full(number, Op.UNSHARD), zeros
    grown = program.inserted(NewRows(NewRows.before(rows), zeros, ops, stages, zeros, zeros, zeros))

    expected = {name: np.insert(getattr(program, name), rows, 0) for name in ("microbatch", "stage", "slot")}
    assert all((getattr(grown, name) == column).all() for name, column in expected.items())
    assert (grown.op == np.insert(program.op, rows, Op.UNSHARD)).all()


def test_a_reordered_program_says_anew_which_rows_compute():
    program = lower(SCHEDULE)
    rows = program.compute_rows(0)

    turned = program.reordered([np.arange(length)[::-1] for length in np.diff(program.offsets)])

    assert turned.compute_rows(0).tolist() == (program.offsets[1] - 1 - rows)[::-1].tolist()
    assert turned.ops == program.ops


def test_slots_that_no_program_can_hold_are_refused():
    program = Program.from_schedule(SCHEDULE)

    with pytest.raises(ScheduleError, match="position 3: slot -1 is out of range"):
        program.with_slots(np.array([0, 0, 0, -1, 0, 0, 0, 0]))
    with pytest.raises(ScheduleError, match="the column slot has shape"):
        program.with_slots(np.zeros(7, np.int32))


@pytest.mark.feature("0.5")
def test_forward_only_means_no_backward_whatever_else_there_is():
    forwards = Program.from_schedule(SCHEDULE.forward_only())

    grown = forwards.inserted(new_rows(NewRows.after(np.array([0])), [0], [Op.SEND_FORWARD], [0]))

    assert grown.is_forward_only
    assert not Program.from_schedule(SCHEDULE).is_forward_only


def test_the_first_microbatches_keep_all_gathers():
    program = Program.from_csv("0UNSHARD,0F0,0F1,0RESHARD,0UNSHARD,0F2,0RESHARD")

    first = program.first_microbatches(1)

    assert first.to_csv().strip() == "0UNSHARD,0F0,0RESHARD,0UNSHARD,0RESHARD"
    assert first.num_microbatches == 1


def test_groups_are_of_messages_alone():
    program = lower(build("gpipe", ranks=1, microbatches=1))

    with pytest.raises(ScheduleError, match=r"position 1: group 1 is out of range; expected a number 0, since only"):
        program.with_groups(np.array([0, 1, 0]))
    with pytest.raises(ScheduleError, match=r"group -1 is out of range; expected a number 0 or more"):
        program.with_groups(np.array([0, -1, 0]))


def test_a_group_lies_between_two_other_rows_of_one_rank():
    program = coalesce_messages(lower(build("1f1b", ranks=2, microbatches=4), "coalesced"))
    apart = np.where(program.group == 2, 1, program.group)  # a computation lies between the two

    with pytest.raises(ScheduleError, match=r"group 1 is out of range; expected a number of a group whose rows follow"):
        program.with_groups(apart)


def test_an_order_that_takes_a_group_apart_is_refused():
    grouped = coalesce_messages(post_receives_late(lower(build("1f1b", ranks=4, microbatches=4), "coalesced")))

    with pytest.raises(ScheduleError, match="expected a number of a group whose rows follow each other on one rank"):
        post_receives_ahead(grouped)
    assert Program.from_json(coalesce_messages(grouped, "peer").to_json()) == coalesce_messages(grouped, "peer")


def test_groups_make_another_program_and_no_groups_the_same():
    program = lower(build("1f1b", ranks=2, microbatches=4), "coalesced")

    grouped = coalesce_messages(program)

    assert grouped != program
    assert program != grouped
    assert grouped.digest() != program.digest()
    assert grouped.with_groups(np.zeros(program.num_rows, np.int64)) == program
    assert grouped.select(np.arange(program.num_rows)) == grouped
