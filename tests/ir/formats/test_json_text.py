"""JSON: a complete round trip, and strict reading that names the path of what is wrong."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import FormatError
from penstock.ir.formats.json_text import kind_of_json
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.lowering import coalesce_messages, lower
from penstock.schedules import build
from tests.ir.formats.test_torch_csv import assert_same_columns
from tests.support.strategies import ends, feasible_schedules

SCHEDULE = build("1f1b", ranks=2, microbatches=3)
PROGRAM = lower(SCHEDULE, tied_groups=[(0, 1)], optimizer_step=True)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def with_value(text, path, value):
    """The text with one value replaced; `path` is a list of keys."""
    document = json.loads(text)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(document)


@given(feasible_schedules())
def test_a_schedule_reads_back_as_itself(schedule):
    again = Schedule.from_json(schedule.to_json())

    assert again == schedule
    assert (again.name, again.placement) == (schedule.name, schedule.placement)


@given(feasible_schedules(), st.booleans())
def test_a_program_reads_back_as_itself(schedule, has_step):
    program = lower(schedule, tied_groups=[(0,), ends(schedule)], optimizer_step=has_step)

    again = Program.from_json(program.to_json())

    assert_same_columns(again, program)
    assert (again.name, again.placement, again.tied_groups) == (program.name, program.placement, program.tied_groups)
    assert (again.num_microbatches, again.num_slices) == (program.num_microbatches, program.num_slices)


def test_the_text_says_what_it_holds():
    assert kind_of_json(SCHEDULE.to_json()) == "penstock-schedule"
    assert kind_of_json(PROGRAM.to_json()) == "penstock-program"


@pytest.mark.parametrize("text", ['{"format": "other"}', "{}", '{"format": 1}'])
def test_a_text_that_holds_neither_is_refused(text):
    with pytest.raises(FormatError, match=r"format: .* cannot be read"):
        kind_of_json(text)


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [("", 1, 1), ('{"name": ', 1, 10), ('{\n  "name": }', 2, 11), ("[" * 100_000, 1, 1025), ('{"a": NaN}', 1, 7)],
)
def test_what_is_no_json_is_refused_with_line_and_column(text, line, column):
    with pytest.raises(FormatError, match="this is no JSON") as caught:
        Schedule.from_json(text, file="plan.json")

    assert (caught.value.file, caught.value.line) == ("plan.json", line)
    assert abs(caught.value.column - column) <= 1


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (["format"], "penstock-program", r"format: .* expected 'penstock-schedule'"),
        (["version"], 2, "version: 2 cannot be read here; expected 1"),
        (["extra"], 1, r'"extra" is no key'),
        (["microbatch"], 1, r"Did you mean 'microbatches'"),
        (["name"], 7, "name: 7 is no text"),
        (["microbatches"], 0, "microbatches: 0 does not fit"),
        (["microbatches"], 4, "route_of_microbatch: 3 entries; expected 4"),
        (["slices"], 2**31 - 1, "far more than the 12 actions"),
        (["route_of_microbatch", 1], 1, r"route_of_microbatch\[1\]: 1 does not fit"),
        (["placement"], [], r"placement: \[\] is no object"),
        (["placement", "extra"], 1, r'placement: "extra" is no key'),
        (["placement", "style"], None, "placement.style: null is no text"),
        (["placement", "style"], "lop", r'placement.style: "lop" is no style; expected line, .* Did you mean .*loop'),
        (["placement", "rank_of_stage", 0], -1, r"placement.rank_of_stage\[0\]: -1 does not fit"),
        (["placement", "routes", 0, 1], "1", r"placement.routes\[0\]\[1\]: \"1\" does not fit"),
        (["placement", "routes"], [[0]], "placement: .*route"),
        (["ranks"], {}, r"ranks: {} is no list"),
        (["ranks"], [["0F0"]], "ranks: 1 lists; expected 2"),
        (["ranks", 1], "1F0", r'ranks\[1\]: "1F0" is no list'),
        (["ranks", 1, 2], 5, r"ranks\[1\]\[2\]: 5 is no text"),
        (["ranks", 1, 2], "1F0x", r"ranks\[1\]\[2\], character 4: '1F0x' is not an action"),
        (["ranks", 1, 2], "1SEND_B0", r"ranks\[1\]\[2\]: a schedule has no communication"),
    ],
)
def test_what_is_wrong_in_a_schedule_is_refused_with_its_path(path, value, told):
    with pytest.raises(FormatError, match=told):
        Schedule.from_json(with_value(SCHEDULE.to_json(), path, value))


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (["format"], "penstock-schedule", r"format: .* expected 'penstock-program'"),
        (["tied_groups", 0, 0], 2, r"tied_groups\[0\]\[0\]: 2 does not fit"),
        (["omits_reductions"], False, "omits_reductions: false does not fit; expected true, or no such key"),
        (["slots"], [[]], "slots: 1 lists; expected 2"),
        (["slots", 1], [0], r"slots\[1\]: 1 numbers; expected"),
        (["slots", 0, 3], -1, r"slots\[0\]\[3\]: -1 does not fit"),
        (["peers", 1, 0], 2, r"peers\[1\]\[0\]: 2 is no peer; expected below 2"),
        (["peers", 0, -2], 1, r"peers\[0\]\[\d+\]: 1 is no peer; expected the tied group that its text names, below 1"),
    ],
)
def test_what_is_wrong_in_a_program_is_refused_with_its_path(path, value, told):
    with pytest.raises(FormatError, match=told):
        Program.from_json(with_value(PROGRAM.to_json(), path, value))


def test_a_program_with_units_reads_back_as_one_and_others_do_not_name_them():
    schedule = build("zbv", ranks=2, microbatches=4)
    program = lower(schedule, shard="full", residency=1, units=[(0, 3)])

    assert Program.from_json(program.to_json()) == program
    assert '"units": [[0,3]]' in program.to_json()
    assert "units" not in lower(schedule).to_json()
    with pytest.raises(FormatError, match=r"units\[0\]\[1\]: 4 does not fit"):
        Program.from_json(program.to_json().replace("[[0,3]]", "[[0,4]]"))


def test_a_program_with_groups_reads_back_as_one_and_others_do_not_name_them():
    program = coalesce_messages(lower(build("1f1b", ranks=2, microbatches=3), "coalesced"))

    assert Program.from_json(program.to_json()) == program
    assert "groups" not in lower(build("1f1b", ranks=2, microbatches=3)).to_json().replace("tied_groups", "")
    with pytest.raises(FormatError, match=r"groups\[0\]: \d+ numbers; expected"):
        Program.from_json(with_value(program.to_json(), ["groups", 0], [0]))


def test_a_program_that_omits_its_reductions_reads_back_as_one():
    program = Program.from_schedule(SCHEDULE)

    assert Program.from_json(program.to_json()).omits_reductions
    assert not Program.from_json(PROGRAM.to_json()).omits_reductions


@pytest.mark.parametrize("old", ['"microbatches": 3', '"style":"line"'])
@pytest.mark.parametrize("spelling", ["plain", "escaped"])
def test_a_key_that_is_there_twice_is_refused(old, spelling):
    key, _, value = old.partition(":")
    again = key if spelling == "plain" else key.replace("s", "\\u0073")
    text = SCHEDULE.to_json()
    assert old in text

    with pytest.raises(FormatError, match=rf"the key {key} is there 2 times; expected it once"):
        Schedule.from_json(text.replace(old, f"{old}, {again}: {value}"))


def test_a_name_that_is_also_a_key_is_no_repeated_key():
    text = replace(SCHEDULE, name='ranks "ranks": \\').to_json()

    assert Schedule.from_json(text).name == 'ranks "ranks": \\'
    assert Schedule.from_json(replace(SCHEDULE, name="ranks").to_json()) == SCHEDULE


@pytest.mark.parametrize("depth", [300, 900])
def test_what_is_nested_too_deeply_is_refused(depth):
    nested = "[" * depth + "]" * depth

    for text in (nested, SCHEDULE.to_json().replace('"microbatches": 3', f'"microbatches": {nested}')):
        with pytest.raises(FormatError, match="a value that is nested too deeply"):
            Schedule.from_json(text)


@pytest.mark.parametrize("key", json.loads(PROGRAM.to_json()))
def test_every_key_is_needed(key):
    document = json.loads(PROGRAM.to_json())
    del document[key]

    with pytest.raises(FormatError, match=f'the key "{key}" is missing'):
        Program.from_json(json.dumps(document))


@given(st.sampled_from(sorted(json.loads(PROGRAM.to_json()))), ANYTHING)
def test_whatever_stands_at_a_key_nothing_but_a_format_error_comes_out(key, value):
    text = with_value(PROGRAM.to_json(), [key], value)

    try:
        program = Program.from_json(text)
    except FormatError:
        return
    assert program.num_instructions == PROGRAM.num_instructions


@given(st.text(max_size=20))
def test_whatever_the_text_nothing_but_a_format_error_comes_out(text):
    with pytest.raises(FormatError):
        Schedule.from_json(text)
