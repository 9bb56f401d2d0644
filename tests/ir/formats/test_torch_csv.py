"""torch's CSV: read and written as torch does, and everything else refused with its place."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import FormatError
from penstock.ir.formats import torch_csv
from penstock.ir.formats.torch_csv import table_to_csv
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.lowering.assign_slots import assign_slots
from penstock.proofs import check
from penstock.schedules import build
from tests.support.strategies import ends, feasible_schedules, schedules
from tests.support.work import lines_run

FROM_TORCH = json.loads((Path(__file__).parents[2] / "data" / "torch_csv.json").read_text(encoding="utf-8"))
ROWS = {key: case for key, case in FROM_TORCH.items() if "rows" in case}
LOWERED = {key: case["lowered"] for key, case in FROM_TORCH.items() if "lowered" in case}
NOISE = st.text('0123456789FBIWRECVSENDOLAP_UH.;()",\n\r \t\0\ufeffé', max_size=80)


def assert_same_columns(program, other):
    for name in (*Program.COLUMNS, "offsets", "route_of_microbatch"):
        assert np.array_equal(getattr(program, name), getattr(other, name)), name


@given(feasible_schedules())
def test_any_order_reads_back_in_its_order(schedule):
    again = Schedule.from_csv(table_to_csv(schedule))

    assert list(again) == list(schedule)
    assert again.placement.rank_of_stage == schedule.placement.rank_of_stage


@given(schedules(max_ranks=3, max_microbatches=4), st.booleans())
def test_a_program_reads_back_as_itself_once_its_slots_are_assigned(schedule, has_step):
    groups = [] if schedule.is_forward_only else [(0,), ends(schedule)]
    program = lower(schedule, tied_groups=groups, optimizer_step=has_step)

    again = assign_slots(Program.from_csv(table_to_csv(program)))

    assert_same_columns(again, program)
    assert again.tied_groups == program.tied_groups
    assert again.placement == program.placement


@pytest.mark.parametrize("key", ROWS)
def test_rows_of_torch_are_read_with_their_stages(key):
    text = "\r\n".join(ROWS[key]["rows"]) + "\r\n"

    schedule = Schedule.from_csv(text)

    assert list(schedule.placement.rank_of_stage) == ROWS[key]["stage_to_rank"]
    assert table_to_csv(schedule).splitlines() == [
        ",".join(cell for cell in row.split(",") if cell) for row in ROWS[key]["rows"]
    ]


@pytest.mark.parametrize("key", LOWERED)
def test_programs_of_torch_are_read_and_written_as_they_are_and_are_whole(key):
    text = "\r\n".join(LOWERED[key]) + "\r\n"

    assert table_to_csv(Program.from_csv(text)) == text
    program = assign_slots(Program.from_csv("\n".join(LOWERED[key])))
    assert not check(program).omits_reductions


@pytest.mark.parametrize(
    ("text", "omits"),
    [
        ("0F0,0B0", True),
        ("0F0,0I0,0W0", True),
        ("0F0", False),
        ("0F0,0B0,0REDUCE_GRAD", False),
        ("0F0,0B0,0STEP", False),
    ],
)
def test_a_training_program_without_reductions_is_read_as_one_that_omits_them(text, omits):
    assert Program.from_csv(text).omits_reductions == omits


def test_what_torch_does_not_have_can_be_left_out():
    program = lower(build("1f1b", ranks=2, microbatches=1), tied_groups=[(0, 1)], optimizer_step=True)

    assert "0REDUCE_TIED0,0STEP" in table_to_csv(program)
    assert program.to_csv(torch_only=True).splitlines()[1] == "1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD"


@pytest.mark.parametrize(
    "text",
    [
        "0F0,0B0\n1F0,1B0",
        "0F0,0B0\r\n1F0,1B0\r\n\r\n",
        "\ufeff0F0,0B0\n1F0,1B0\n",
        " 0F0 ,\t0B0\n1F0,,,1B0,,\n",
        '"0F0","0B0"\n1F0, "1B0"\n',
    ],
)
def test_line_ends_blanks_quotes_and_a_byte_order_mark_do_not_matter(text):
    assert table_to_csv(Schedule.from_csv(text)) == "0F0,0B0\r\n1F0,1B0\r\n"


@pytest.mark.feature("B19")
@pytest.mark.parametrize(
    ("text", "line", "column", "told"),
    [
        ("", 1, 1, "the text is empty"),
        ("0F0, 2F0junk", 1, 9, "2F0junk"),
        ("0F0\n1F0,,1F", 2, 8, "ends without its microbatch"),
        ("0F0\n\n1F0", 2, 1, "rank 1 has no actions"),
        ("0F0,1F0\n1F1", 2, 1, "on rank 0 and on rank 1"),
        ('0F0,"0B0', 1, 5, "not closed"),
        ('0F0,"0B0,"', 1, 5, "is not an action"),
        ("0F0,0SEND_F0\n1F0", 1, 5, "has communication"),
    ],
)
def test_what_is_no_schedule_is_refused_with_line_and_column(text, line, column, told):
    with pytest.raises(FormatError) as caught:
        Schedule.from_csv(text, file="plan.csv")

    assert str(caught.value).startswith(f"plan.csv:{line}:{column}: ")
    assert told in str(caught.value)


def test_a_text_of_more_cells_than_the_cap_is_refused_before_it_is_read(monkeypatch):
    monkeypatch.setattr(torch_csv, "MAX_CELLS", 3)

    with pytest.raises(FormatError, match=r"plan\.csv:1:1: the text has more than 3 cells"):
        Schedule.from_csv("0F0,0F1\n1F0,1F1\n", file="plan.csv")


@pytest.mark.parametrize(
    ("text", "line", "column", "told"),
    [
        ("0F0,,0SEND_F0\n1RECV_F0,1F0", 1, 5, "empty cell"),
        ("0F0,0SEND_F0,\n1RECV_F0,1F0", 1, 14, "empty cell"),
        ("0F0\n1F0,1SEND_F0", 2, 5, "there is no stage after stage 1"),
        ("0RECV_F0,0F0", 1, 1, "there is no stage before stage 0"),
        ("0F0,0REDUCE_TIED1", 1, 5, "tied group 1 is here"),
    ],
)
def test_what_is_no_program_is_refused_with_line_and_column(text, line, column, told):
    with pytest.raises(FormatError) as caught:
        Program.from_csv(text, file="plan.csv")

    assert str(caught.value).startswith(f"plan.csv:{line}:{column}: ")
    assert told in str(caught.value)


@settings(max_examples=300)
@given(NOISE)
@example("0F0,0F2147483647")
@example("0F0.32767\n1F32000.32767")
def test_whatever_the_text_nothing_but_a_format_error_comes_out(text):
    for kind in (Schedule, Program):
        try:
            table = kind.from_csv(text)
        except FormatError:
            continue
        assert table.num_microbatches * table.num_slices * table.num_stages <= 1_000_000


def test_the_lines_that_run_to_read_cells_grow_with_their_number_and_not_with_the_square():
    def num_lines(num_microbatches):
        text = table_to_csv(build("1f1b", ranks=8, microbatches=num_microbatches))
        return lines_run(lambda: Schedule.from_csv(text))

    assert num_lines(400) < 1.1 * 4 * num_lines(100)
