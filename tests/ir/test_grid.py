"""Grids: drawn in time or plain, marked, cut, and read back."""

from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import FormatError
from penstock.ir.grid import from_grid, grid_columns, to_grid
from penstock.lowering import lower
from penstock.schedules import build
from tests.proofs.tables import schedule_of
from tests.support.strategies import feasible_schedules

SCHEDULE = build("1f1b", ranks=2, microbatches=2)


def clean(drawing):
    return dedent(drawing).strip()


def test_a_schedule_is_drawn_in_time_and_plain_on_request():
    assert to_grid(SCHEDULE) == clean(
        """
        rank 0: 0F0 0F1 .   .   0B0 =   .   0B1 =
        rank 1: .   1F0 1B0 =   1F1 1B1 =
        """
    )
    assert to_grid(SCHEDULE, timed=False) == clean(
        """
        rank 0: 0F0 0F1 0B0 0B1
        rank 1: 1F0 1B0 1F1 1B1
        """
    )


def test_an_order_that_cannot_run_is_drawn_plain():
    blocked = schedule_of("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0")

    assert to_grid(blocked) == clean(
        """
        rank 0: 0F0 0B0 0F1 0B1
        rank 1: 1F1 1B1 1F0 1B0
        """
    )


def test_a_program_is_drawn_plain_and_aligned():
    assert to_grid(lower(build("gpipe", ranks=2, microbatches=1))) == clean(
        """
        rank 0: 0F0          0SEND_F0     0RECV_B0     0B0          0REDUCE_GRAD
        rank 1: 1RECV_F0     1F0          1B0          1SEND_B0     1REDUCE_GRAD
        """
    )


def test_an_overlapped_pair_is_one_cell_and_takes_the_time_of_both():
    schedule = schedule_of("0F0 (0F1;0B0)OVERLAP_F_B 0B1\n1F0 1B0 1F1 1B1")

    assert to_grid(schedule).splitlines()[0].split() == [
        "rank", "0:", "0F0", ".", ".", ".", "(0F1;0B0)", "=", "=", ".", ".", ".", "0B1", "=",
    ]  # fmt: skip
    assert from_grid(to_grid(schedule)) == schedule
    assert from_grid(to_grid(schedule, timed=False)) == schedule


def test_labels_of_many_ranks_are_aligned():
    lines = to_grid(build("gpipe", ranks=11, microbatches=1), timed=False).splitlines()

    assert lines[0] == "rank 0:  0F0  0B0"
    assert lines[10] == "rank 10: 10F0 10B0"


@given(feasible_schedules(), st.booleans())
def test_any_drawn_order_reads_back_in_its_order(schedule, timed):
    assert list(from_grid(to_grid(schedule, timed=timed))) == list(schedule)


@pytest.mark.parametrize(
    "drawing",
    [
        "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1",
        "\n    0F0 0F1 . . 0B0 = 0B1 =\n\n    . 1F0 1B0 = 1F1 1B1 =\n",
        "rank 0: 0F0 | 0F1 | 0B0 | 0B1 |\nrank 1: 1F0 | 1B0 | 1F1 | 1B1 |\r\n",
        "rank 0 |0F0|0F1|0B0|0B1|\n    ^ here\nrank 1 |1F0|1B0|1F1|1B1|",
        "# mine, all of it\nrank 0: 0F0 0F1 0B0 0B1\n  # 9F9\nrank 1: 1F0 1B0 1F1 1B1",
    ],
)
def test_labels_bars_indentation_marks_and_comments_may_be_there_or_not(drawing):
    assert from_grid(drawing) == SCHEDULE


@pytest.mark.parametrize("gap", ["\n", "\n\n", "\n\n  \n# the second half\n"])
def test_a_wrapped_drawing_is_put_together_from_its_blocks(gap):
    first = "rank 0: 0F0 0F1 .   .   0B0\nrank 1: .   1F0 1B0 =   1F1"
    second = "rank 0: =   .   0B1 =\nrank 1: 1B1 ="

    assert from_grid(first + gap + second) == SCHEDULE


@pytest.mark.parametrize(
    ("drawing", "line", "column", "told"),
    [
        ("", 1, 1, "the drawing is empty"),
        ("0F0\n\n  1F0 1X0", 3, 8, "is not an action"),
        ("rank 0: 0F0\nrank 2: 1F0", 2, 6, "the label says rank 2; expected rank 1"),
        ("rank 0: 0F0\nrank 1: 1F0\n\nrank 0: 0B0\nrank 2: 1B0", 5, 6, "the label says rank 2; expected rank 1"),
        ("rank 0: 0F0\nrank 1: 1F0\n\nrank 0: 0B0", 4, 1, "block 2 ends with rank 0; expected all of the 2 ranks"),
        ("rank 0: 0F0\nrank 1: 1F0\nrank 0:\nrank 1:\nrank 2: 2F0", 5, 1, "rank 2 is in no block above"),
        ("rank 0: 0F0 .\nrank 1: 1F0\nrank 0: = 0B0\nrank 1: 1B0", 3, 9, "nothing goes on here"),
        ("rank 0: 0F0 0B0\nrank 1: 1F0, 1B0", 2, 12, "ends in a comma; expected blanks"),
        ("0F0 0B0 # done", 1, 9, "is a comment"),
        ("0F0 . = 0B0", 1, 7, "nothing goes on here"),
        ("0F0 ...", 1, 5, "cut off here"),
        ("rank 0: 0F0\nrank 1: . .\nrank 2: 1F0", 2, 1, "rank 1 has no actions"),
        ("0F0 0SEND_F0\n1RECV_F0 1F0", 1, 5, "a drawing of a program"),
    ],
)
def test_what_is_no_drawing_is_refused_with_line_and_column(drawing, line, column, told):
    with pytest.raises(FormatError) as caught:
        from_grid(drawing, file="drawing.txt")

    assert str(caught.value).startswith(f"drawing.txt:{line}:{column}: ")
    assert told in str(caught.value)


@given(st.text("0123FBIW.=|^;() \nrank:", max_size=60))
def test_whatever_the_text_nothing_but_a_format_error_comes_out(text):
    try:
        schedule = from_grid(text)
    except FormatError:
        return
    assert schedule.num_actions


@given(feasible_schedules())
def test_the_columns_of_a_drawing_are_known_before_it_is_made(schedule):
    program = lower(schedule)
    assert grid_columns(program) == max(len(to_row) for to_row in program)

    words = [line.partition(": ")[2].split() for line in to_grid(schedule).splitlines()]
    assert grid_columns(schedule) == max(map(len, words))
