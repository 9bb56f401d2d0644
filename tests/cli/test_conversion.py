"""Conversions of texts: communication is kept, added or dropped as asked, and what is written has been proved."""

import json

import pytest
from hypothesis import given

from penstock.cli.conversion import convert, describe_plan, read_plan
from penstock.errors import ConfigError, FormatError, ScheduleError
from penstock.ir.formats import WITH_COMMUNICATION, WRITABLE
from penstock.ir.reading import read_table
from penstock.ir.writing import write_table
from penstock.lowering import lower
from penstock.proofs import check
from penstock.schedules import build
from tests.strategies import schedules

SCHEDULE = build("1f1b", ranks=2, microbatches=3)
PROGRAM = lower(SCHEDULE)


def converted(text, name, is_lowered=False, **source):
    return convert(read_plan(text, file="plan", **source), name, file="plan", is_lowered=is_lowered)[0]


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
        assert convert(read_plan(lowered, file="").actions(), name, file="")[0] == write_table(schedule, name)


@pytest.mark.parametrize("name", WITH_COMMUNICATION)
def test_communication_is_kept_where_it_can_be(name):
    assert convert(read_plan(PROGRAM.to_csv(), file="plan", name="1f1b"), name, file="plan")[0] == write_table(
        PROGRAM, name
    )
    assert converted(PROGRAM.to_json(), name) == write_table(PROGRAM, name)
    assert converted(SCHEDULE.to_csv(), name) != write_table(PROGRAM, name)


@pytest.mark.parametrize("name", ["grid", "deepspeed", "deepspeed-old"])
def test_other_formats_take_the_actions_of_a_program(name):
    assert converted(PROGRAM.to_csv(), name) == write_table(SCHEDULE, name)


def test_a_program_stays_as_it_is_where_communication_is_asked_for():
    assert converted(PROGRAM.to_csv(), "csv", True) == PROGRAM.to_csv()


def test_what_is_lowered_is_summed_up_as_a_program():
    assert "12 actions, 26 instructions" in convert(SCHEDULE, "csv", file="", is_lowered=True)[1]
    assert "12 actions; peak" in convert(PROGRAM.actions(), "csv", file="")[1]


def test_the_format_of_the_text_may_be_given():
    with pytest.raises(FormatError, match="plan:1:4: '0F0,0F1"):
        converted(SCHEDULE.to_csv(), "json", format="grid")


def test_the_name_of_the_source_becomes_that_of_the_schedule_where_it_has_none():
    assert read_plan(SCHEDULE.to_csv(), file="", name="mine").name == "mine"
    assert read_plan(SCHEDULE.to_json(), file="", name="mine").name == "1f1b"


def test_a_wrong_schedule_is_not_converted():
    with pytest.raises(ScheduleError, match="0B2"):
        converted(SCHEDULE.to_csv().replace("0B2", "0B1"), "json")


def test_a_wrong_program_is_not_converted_but_its_actions_are():
    text = PROGRAM.to_csv().replace("0SEND_F0,", "")

    with pytest.raises(ScheduleError, match="1RECV_F0"):
        converted(text, "json")
    assert convert(read_plan(text, file="").actions(), "csv", file="")[0] == SCHEDULE.to_csv()


def test_slots_in_json_are_proved_as_they_are():
    table = json.loads(PROGRAM.to_json())
    table["slots"] = [[0] * len(slots) for slots in table["slots"]]

    with pytest.raises(ScheduleError, match="overwrites slot 0"):
        converted(json.dumps(table), "csv")


# ---- in words


def test_a_schedule_is_told_by_its_size_and_peaks():
    schedule = build("1f1b", ranks=2, microbatches=3)

    assert (
        describe_plan(schedule, check(schedule))
        == "2 ranks, 2 stages, 3 microbatches, 12 actions; peak activations per rank 2, 1"
    )


def test_one_of_a_kind_is_told_as_one():
    schedule = build("1f1b", ranks=1, microbatches=1)

    assert describe_plan(schedule, check(schedule)).startswith("1 rank, 1 stage, 1 microbatch, 2 actions;")


def test_a_program_is_told_by_its_instructions():
    program = lower(build("gpipe", ranks=2, microbatches=3))

    told = describe_plan(program, check(program))

    assert f"12 actions, {program.num_instructions} instructions; peak activations per rank 3, 3" in told


def test_whole_stages_are_told_of_a_program_that_gathers():
    schedule = build("looped-bfs", ranks=2, microbatches=2, stages_per_rank=2)

    told = [describe_plan(each, check(each)) for each in (lower(schedule, shard="full"), lower(schedule))]

    assert "; whole stages per rank 2, 2" in told[0]
    assert "whole" not in told[1]
