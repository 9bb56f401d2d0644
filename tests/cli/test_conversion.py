"""Conversions of texts: communication is kept, added or dropped as asked, and what is written has been proved."""

import json

import pytest
from hypothesis import given

from penstock.cli.conversion import Source, Target, convert
from penstock.errors import ConfigError, FormatError, ScheduleError
from penstock.ir.formats import WITH_COMMUNICATION, WRITABLE
from penstock.ir.reading import read_table
from penstock.ir.writing import write_table
from penstock.lowering import lower
from penstock.schedules import build
from tests.strategies import schedules

SCHEDULE = build("1f1b", ranks=2, microbatches=3)
PROGRAM = lower(SCHEDULE)


def converted(text, *target, **source):
    return convert(Source(text, "plan", **source), Target(*target)).text


@pytest.mark.slow
@given(schedule=schedules())
def test_there_and_back_through_any_format_is_the_same_text(schedule):
    for name in WRITABLE:
        try:
            text = converted(schedule.to_json(), name)
        except ConfigError:
            continue
        assert read_table(text) == schedule
        assert converted(text, name) == text


@pytest.mark.slow
@given(schedule=schedules())
def test_adding_and_dropping_communication_gives_the_schedule_back(schedule):
    for name in WITH_COMMUNICATION:
        lowered = converted(schedule.to_json(), name, True)
        assert lowered == write_table(lower(schedule), name)
        assert converted(lowered, name, False, True) == write_table(schedule, name)


@pytest.mark.parametrize("name", WITH_COMMUNICATION)
def test_communication_is_kept_where_it_can_be(name):
    assert converted(PROGRAM.to_csv(), name, name="1f1b") == write_table(PROGRAM, name)
    assert converted(PROGRAM.to_json(), name) == write_table(PROGRAM, name)
    assert converted(SCHEDULE.to_csv(), name) != write_table(PROGRAM, name)


@pytest.mark.parametrize("name", ["grid", "deepspeed", "deepspeed-old"])
def test_other_formats_take_the_actions_of_a_program(name):
    assert converted(PROGRAM.to_csv(), name) == write_table(SCHEDULE, name)


def test_a_program_stays_as_it_is_where_communication_is_asked_for():
    assert converted(PROGRAM.to_csv(), "csv", True) == PROGRAM.to_csv()


def test_what_is_lowered_is_summed_up_as_a_program():
    assert "12 actions, 26 instructions" in convert(Source(SCHEDULE.to_csv(), "plan"), Target("csv", True)).summary
    assert "12 actions; peak" in convert(Source(PROGRAM.to_csv(), "plan"), Target("csv", False, True)).summary


@pytest.mark.parametrize("name", ["grid", "megatron"])
def test_communication_cannot_be_added_where_there_is_no_place_for_it(name):
    with pytest.raises(ConfigError, match=f"--lowered: {name} holds actions alone; write csv or json"):
        converted(SCHEDULE.to_csv(), name, True)


def test_the_format_of_the_text_may_be_given():
    with pytest.raises(FormatError, match="plan:1:4: '0F0,0F1"):
        converted(SCHEDULE.to_csv(), "json", format="grid")


def test_the_name_of_the_source_becomes_that_of_the_schedule_where_it_has_none():
    assert json.loads(converted(SCHEDULE.to_csv(), "json", name="mine"))["name"] == "mine"
    assert json.loads(converted(SCHEDULE.to_json(), "json", name="mine"))["name"] == "1f1b"


def test_a_wrong_schedule_is_not_converted():
    with pytest.raises(ScheduleError, match="0B2"):
        converted(SCHEDULE.to_csv().replace("0B2", "0B1"), "json")


def test_a_wrong_program_is_not_converted_but_its_actions_are():
    text = PROGRAM.to_csv().replace("0SEND_F0,", "")

    with pytest.raises(ScheduleError, match="1RECV_F0"):
        converted(text, "json")
    assert converted(text, "csv", False, True) == SCHEDULE.to_csv()


def test_slots_in_json_are_proved_as_they_are():
    table = json.loads(PROGRAM.to_json())
    table["slots"] = [[0] * len(slots) for slots in table["slots"]]

    with pytest.raises(ScheduleError, match="overwrites slot 0"):
        converted(json.dumps(table), "csv")
