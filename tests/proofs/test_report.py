"""All findings end in one error, in order, with a picture of the places around the first."""

import pytest

from penstock.errors import ScheduleError
from penstock.proofs.report import MAX_COLUMNS, MAX_RANKS, Subject, draw
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
