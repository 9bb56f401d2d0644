"""Errors: one family, messages with their place, and hints."""

import pytest

from penstock import errors
from penstock.errors import (
    MAX_SHOWN,
    ConfigError,
    FormatError,
    PenstockError,
    ScheduleError,
    Violation,
    count_of,
    described,
    listed,
    nearest,
)


def violation(position):
    return Violation(2, position, "2B3", "runs before its F", "Move F earlier")


def test_catching_the_base_catches_every_error():
    own = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    own = [kind for kind in own if not issubclass(kind, Warning)]

    assert ScheduleError in own
    assert all(issubclass(kind, PenstockError) for kind in own)
    assert all(issubclass(kind, errors.PipelineError) for kind in (errors.PeerLost, errors.DeadlineExceeded))


def test_a_violation_says_where_what_and_the_fix():
    assert str(violation(7)) == "rank 2, position 7: 2B3 runs before its F. Move F earlier."
    assert str(Violation(0, 1, "", "is missing 0F1", "Add it")) == "rank 0, position 1: is missing 0F1. Add it."


def test_a_schedule_error_lists_the_first_ten_and_the_count_of_more():
    error = ScheduleError("broken", [violation(position) for position in range(MAX_SHOWN + 3)], "the picture")

    lines = str(error).splitlines()
    assert lines[0] == "broken"
    assert len([line for line in lines if "rank 2" in line]) == MAX_SHOWN
    assert "  ... 13 violations in all" in lines
    assert lines[-1] == "the picture"
    assert len(error.violations) == 13
    assert "in all" not in str(ScheduleError("broken", error.violations[:MAX_SHOWN]))


def test_a_format_error_begins_with_file_line_and_column():
    error = FormatError("is wrong", file="plan.csv", line=3, column=9)

    assert str(error) == "plan.csv:3:9: is wrong"
    assert (error.file, error.line, error.column, error.problem) == ("plan.csv", 3, 9, "is wrong")


@pytest.mark.parametrize(("key", "text"), [("data.size", "data.size: too large"), ("", "too large")])
def test_a_config_error_begins_with_its_key(key, text):
    error = ConfigError("too large", key=key)

    assert str(error) == text
    assert error.key == key


def test_the_nearest_name_is_offered_where_one_is_near():
    assert nearest("warmpu", ["warmup", "order"]) == " Did you mean 'warmup'?"
    assert nearest("gpip", ["gpipe", "gpipes"]) == " Did you mean 'gpipe' or 'gpipes'?"
    assert nearest("zzz", ["warmup"]) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True of type bool"),
        (4.0, "4.0 of type float"),
        ("x" * 60, "'" + "x" * 36 + "... of type str"),
    ],
)
def test_a_wrong_value_is_shown_short_and_with_its_type(value, text):
    assert described(value) == text


@pytest.mark.parametrize(
    ("number", "noun", "text"), [(1, "rank", "1 rank"), (0, "stage", "0 stages"), (2, "microbatch", "2 microbatches")]
)
def test_a_number_stands_with_its_noun(number, noun, text):
    assert count_of(number, noun) == text


def test_names_are_listed_up_to_a_number_with_the_count_of_the_others():
    names = [f"n{number}" for number in range(12)]

    assert listed(names[:10]) == "n0, n1, n2, n3, n4, n5, n6, n7, n8, n9"
    assert listed(names) == "n0, n1, n2, n3, n4, n5, n6, n7, n8, n9 and 2 more"
    assert listed(names[:3], 2, separator=" ", quoted=repr) == "'n0' 'n1' and 1 more"
