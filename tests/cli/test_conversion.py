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
from tests.support.strategies import schedules

SCHEDULE = build("1f1b", ranks=2, microbatches=3)
PROGRAM = lower(SCHEDULE)


def converted(text, to, is_lowered=False, **source):
    return convert(read_plan(text, file="plan", **source), to, file="plan", is_lowered=is_lowered)[0]


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
    assert converted(PROGRAM.to_csv(), name, name="1f1b") == write_table(PROGRAM, name)
    assert converted(PROGRAM.to_json(), name) == write_table(PROGRAM, name)
    assert converted(SCHEDULE.to_csv(), name) != write_table(PROGRAM, name)
    assert converted(PROGRAM.to_csv(), name, True, name="1f1b") == write_table(PROGRAM, name)
    assert converted(PROGRAM.to_csv(), "grid") == write_table(SCHEDULE, "grid")
    # Where a text has no name, that of its source becomes that of the schedule.
    assert read_plan(SCHEDULE.to_csv(), file="", name="mine").name == "mine"
    assert read_plan(SCHEDULE.to_json(), file="", name="mine").name == "1f1b"


UNSENT = PROGRAM.to_csv().replace("0SEND_F0,", "")
TABLE = json.loads(PROGRAM.to_json())
ONE_SLOT = json.dumps(TABLE | {"slots": [[0] * len(slots) for slots in TABLE["slots"]]})


@pytest.mark.parametrize(
    ("text", "source", "told"),
    [
        (SCHEDULE.to_csv().replace("0B2", "0B1"), {}, "0B2"),
        (UNSENT, {}, "1RECV_F0"),
        (ONE_SLOT, {}, "overwrites slot 0"),
        (SCHEDULE.to_csv(), {"format": "grid"}, "plan:1:4: '0F0,0F1"),
    ],
)
def test_what_is_wrong_or_of_another_format_is_not_converted(text, source, told):
    with pytest.raises(FormatError if source else ScheduleError, match=told):
        converted(text, "json", **source)
    assert convert(read_plan(UNSENT, file="").actions(), "csv", file="")[0] == SCHEDULE.to_csv()


# ---- in words


def test_a_plan_is_told_by_its_size_and_peaks():
    program = lower(build("gpipe", ranks=2, microbatches=3))
    gathers = build("looped-bfs", ranks=2, microbatches=2, stages_per_rank=2)

    small, one, lowered, whole, held = (
        describe_plan(plan, check(plan))
        for plan in (
            SCHEDULE, build("1f1b", ranks=1, microbatches=1), program, lower(gathers), lower(gathers, shard="full"),
        )
    )  # fmt: skip

    assert small == "2 ranks, 2 stages, 3 microbatches, 12 actions; peak activations per rank 2, 1"
    assert one.startswith("1 rank, 1 stage, 1 microbatch, 2 actions;")
    assert f"12 actions, {program.num_instructions} instructions; peak activations per rank 3, 3" in lowered
    assert "whole" not in whole
    assert "; whole stages per rank 2, 2" in held
