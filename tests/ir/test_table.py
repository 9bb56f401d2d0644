"""What schedules and programs share: parts of them, their digest, and what no table can hold."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from penstock.errors import ScheduleError
from penstock.ir.action import Kind, OverlappedPair
from penstock.ir.operations import Op
from penstock.ir.table import short_type
from penstock.lowering import lower
from penstock.schedules import build
from tests.support.strategies import feasible_schedules

PROGRAM = lower(build("1f1b", ranks=2, microbatches=2), tied_groups=[(0, 1)], optimizer_step=True)


@pytest.mark.parametrize(("largest", "expected"), [(0, np.int16), (32_767, np.int16), (32_768, np.int32)])
def test_a_column_is_short_where_its_numbers_are(largest, expected):
    assert short_type(largest) is expected


def test_a_microbatch_leaves_an_activation_for_each_stage_and_slice_of_a_rank():
    assert build("1f1b", ranks=2, microbatches=2).parts_per_rank == 1
    assert build("seq1f1b", ranks=2, microbatches=2, slices=3).parts_per_rank == 3
    assert lower(build("breadth-depth", ranks=2, microbatches=2, slices=2, stages_per_rank=2)).parts_per_rank == 4


@given(schedule=feasible_schedules())
def test_a_split_stage_has_an_input_gradient_of_its_own(schedule):
    assert schedule.split_stages == set(schedule.stage[schedule.kind == Kind.BACKWARD_INPUT].tolist())


@given(schedule=feasible_schedules())
def test_the_computations_of_a_program_are_its_schedule(schedule):
    program = lower(schedule)

    assert program.actions() == schedule == schedule.actions()
    assert program.select(program.compute_rows()).num_rows == schedule.num_rows
    assert np.concatenate([program.compute_rows(rank) for rank in range(program.num_ranks)]).tolist() == (
        program.compute_rows().tolist()
    )


def test_a_selection_keeps_order_ranks_and_whole_pairs():
    schedule = build("dualpipe", ranks=4, microbatches=8)
    forwards = np.flatnonzero(schedule.op == Op.FORWARD)

    assert schedule.select(np.arange(schedule.num_rows)) == schedule
    found = schedule.select(forwards, name="forwards")
    assert (found.name, found.num_rows, found.joined.any()) == ("forwards", len(forwards), False)
    assert any(isinstance(entry, OverlappedPair) for entry in schedule[0])
    assert not any(isinstance(entry, OverlappedPair) for entry in found[0])
    assert [action for rank in found for action in rank] == [schedule.action(row) for row in forwards]


def test_the_digest_tells_tables_apart_but_not_their_names_and_integer_types():
    schedule = build("1f1b", ranks=2, microbatches=3)
    other = build("gpipe", ranks=2, microbatches=3)

    assert replace(schedule, name="other", stage=schedule.stage.astype(np.int64)).digest() == schedule.digest()
    tables = (schedule, other, lower(schedule), lower(schedule, tied_groups=[(0, 1)]), schedule.forward_only())
    assert len({table.digest() for table in tables}) == len(tables)


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("op", 18, "op 18 is out of range; expected a number from 0 to 17"),
        ("stage", 2, "stage 2 is out of range; expected a number from 0 to 1"),
        ("microbatch", 2, "microbatch 2 is out of range"),
        ("slice", 1, "slice 1 is out of range; expected a number from 0 to 0"),
        ("peer", -1, "peer -1 is out of range"),
        ("slot", -1, "slot -1 is out of range; expected a number 0 or more"),
    ],
)
def test_a_number_out_of_range_is_named_with_its_place(column, value, told):
    numbers = getattr(PROGRAM, column).copy()
    numbers[int(PROGRAM.offsets[1]) + 3] = value

    with pytest.raises(ScheduleError, match=f"1f1b, rank 1, position 3: {told}"):
        replace(PROGRAM, **{column: numbers})


@pytest.mark.parametrize(
    ("op", "column", "told"),
    [
        (Op.OPTIMIZER_STEP, "microbatch", "microbatch 1 is out of range; expected a number 0, since the operation has"),
        (Op.REDUCE_TIED, "peer", "peer 1 is out of range; expected a number of a tied group, below 1"),
    ],
)
def test_stray_numbers_of_collectives_are_refused(op, column, told):
    numbers = getattr(PROGRAM, column).copy()
    numbers[np.flatnonzero(PROGRAM.op == op)[0]] = 1

    with pytest.raises(ScheduleError, match=told):
        replace(PROGRAM, **{column: numbers})


@pytest.mark.parametrize("column", ["op", "joined", "offsets", "route_of_microbatch"])
def test_a_column_that_is_no_array_is_refused_by_name(column):
    schedule = build("1f1b", ranks=2, microbatches=2)

    with pytest.raises(ScheduleError, match=rf"^1f1b: {column} is \[.*\] of type list; expected a numpy array$"):
        replace(schedule, **{column: [0, 1]})
