"""Writing in every format, so that what is read back is the same."""

import pytest
from hypothesis import given

from penstock.errors import ConfigError
from penstock.ir.formats import FORMAT_OF_SUFFIX, READABLE, WITH_COMMUNICATION, WRITABLE
from penstock.ir.reading import read_table
from penstock.ir.writing import WRITERS, write_table
from penstock.lowering import lower
from penstock.schedules import build
from tests.support.strategies import schedules

SCHEDULE = build("1f1b", ranks=2, microbatches=3)


@pytest.mark.feature("X13", "B19")
@given(schedule=schedules())
def test_schedules_of_every_family_read_back_as_the_same_from_every_format(schedule):
    for name in ("csv", "json", "grid"):
        again = read_table(write_table(schedule, name), format=name)
        assert again == schedule
        assert again.placement == schedule.placement
    for name in ("deepspeed", "deepspeed-old", "megatron"):
        try:
            text = write_table(schedule, name)
        except ConfigError:
            continue
        assert read_table(text) == schedule


@pytest.mark.parametrize("name", WRITABLE)
def test_a_text_ends_with_one_newline(name):
    schedule = build("interleaved-1f1b", ranks=2, microbatches=4) if name == "megatron" else SCHEDULE

    assert write_table(schedule, name).endswith("\n")
    assert not write_table(schedule, name).endswith("\n\n")


@pytest.mark.parametrize("name", ["deepspeed", "deepspeed-old"])
def test_deepspeeds_streams_are_the_same_from_a_schedule_and_its_program(name):
    assert write_table(lower(SCHEDULE), name) == write_table(SCHEDULE, name)
    assert ("(old)" in write_table(SCHEDULE, name)) == (name == "deepspeed-old")


def test_a_table_of_megatron_takes_no_program():
    program = lower(build("interleaved-1f1b", ranks=2, microbatches=4))

    with pytest.raises(ConfigError, match="has no communication; write the schedule"):
        write_table(program, "megatron")


def test_an_unknown_format_is_refused():
    with pytest.raises(ConfigError, match=r"format: 'deep' is none that can be written; known: csv, .*"):
        write_table(SCHEDULE, "deep")


def test_every_format_that_is_named_has_a_writer_and_is_read_again():
    assert tuple(WRITERS) == WRITABLE
    assert {name.removesuffix("-old") for name in WRITABLE} == set(READABLE)
    assert set(FORMAT_OF_SUFFIX.values()) == set(READABLE)
    assert set(WITH_COMMUNICATION) < set(READABLE)
