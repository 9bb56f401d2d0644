"""All findings end in one error, in order, with a picture of the places around the first."""

import numpy as np
import pytest

from penstock.errors import ScheduleError
from penstock.proofs.report import MAX_COLUMNS, MAX_RANKS, Subject, draw, first_of_each
from penstock.schedules import build
from tests.proofs.tables import lowered, refusal, schedule_of, without


def test_the_marked_places_are_drawn():
    subject = Subject(schedule_of("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"))

    assert draw(subject, {(0, 2), (1, 4)}) == (
        "position   0    1     2     3    4\n"
        "rank 0    0F0  0F1  >0B0<  0B1  <-- here\n"
        "rank 1    1F0  1B0   1F1   1B1  >.<  <-- here"
    )


def test_a_large_table_is_cut_to_a_window_around_the_first_mark():
    subject = Subject(build("1f1b", ranks=64, microbatches=64))

    lines = draw(subject, {(40, 70), (60, 3)}).splitlines()

    assert len(lines) <= MAX_RANKS + 1
    assert len(lines[0].split()) == MAX_COLUMNS + 1
    assert any(line.startswith("rank 40") and line.endswith("<-- here") for line in lines)


def test_violations_are_ordered_and_the_first_ten_are_shown_with_their_number():
    subject = Subject(build("1f1b", ranks=2, microbatches=8))
    for row in reversed(range(12)):
        subject.add(row, "is odd", "Even it")

    with pytest.raises(ScheduleError) as caught:
        subject.raise_if_any()

    text = str(caught.value)
    assert [violation.position for violation in caught.value.violations] == list(range(12))
    assert text.startswith("1f1b: the schedule breaks 12 rules\n  rank 0, position 0: 0F0 is odd. Even it.\n")
    assert "... 12 violations in all" in text
    assert "position 10:" not in text


def test_a_program_is_called_a_program():
    assert refusal(without(lowered(), "0B1")).title == "1f1b: the program breaks 1 rule"


def test_a_row_seen_from_its_own_rank_is_placed_without_the_rank():
    subject = Subject(schedule_of("0F0 0B0\n1F0 1B0"))

    assert subject.place(3) == "1B0 (rank 1, position 1)"
    assert subject.place(3, seen_from=2) == "1B0 (position 1)"


def test_the_first_row_of_each_group_is_found():
    assert first_of_each(np.array([7, 7, 2, 7, 2]), np.array([10, 11, 12, 13, 14])) == [10, 12]
