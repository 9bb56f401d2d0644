"""Third-party code: an error in it is one message with a place, and what it gives is a schedule or refused."""

import re
from functools import partial

import pytest

from penstock.errors import ConfigError, ScheduleError
from penstock.schedules import build
from penstock.schedules.phases import b, f, pair, phases, repeat
from penstock.schedules.third_party import as_schedule, run_third_party
from tests.support.actions import parse_action
from tests.support.grids import assert_grid

GRID = """
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
"""
ROWS = [line.split() for line in GRID.strip().splitlines()]
PHASES = [phases(repeat(2, f(0)), repeat(2, b(0))), phases(repeat(2, f(1), b(1)))]


def fail_deeply():
    return sorted([1, "a"])


def fail_in_a_library():
    return re.compile("(")


FIRST_LINE = fail_deeply.__code__.co_firstlineno


@pytest.mark.parametrize(
    "result",
    [
        GRID,
        ["0F0 0F1 0B0 0B1", "1F0, 1B0, 1F1, 1B1"],
        ROWS,
        [[parse_action(text) for text in row] for row in ROWS],
        (iter(row) for row in ROWS),
        [ROWS[0], "1F0 . 1B0 = 1F1 1B1 ="],
        PHASES,
        [ROWS[0], PHASES[1]],
    ],
    ids=["drawing", "texts", "lists", "actions", "generators", "a row in time", "phases", "a row by phases"],
)
def test_rows_and_drawings_become_a_schedule(result):
    schedule = as_schedule(result, "mine", num_ranks=2)

    assert_grid(schedule, GRID)
    assert schedule.name == "mine"
    assert schedule == build("1f1b", ranks=2, microbatches=2)


def test_phases_may_be_of_any_placement_that_rows_can_be():
    down, up = phases(repeat(2, f(0), f(3, first=2))), phases(repeat(2, f(1), f(2, first=2)))
    slices = [phases(repeat(4, f(rank)), slices=2) for rank in range(2)]

    assert as_schedule([down, up], "mine", num_ranks=2).route_of_microbatch.tolist() == [0, 0, 1, 1]
    assert as_schedule(slices, "mine", num_ranks=2).num_slices == 2
    overlapping = phases(repeat(1, f(0)), repeat(1, pair(f(0), b(0))), repeat(1, b(0)))
    assert_grid(as_schedule([overlapping], "mine", num_ranks=1), "0F0 (0F1;0B0) 0B1")
    assert_grid(
        as_schedule([overlapping, "1F0 1F1 1B0 1B1"], "mine", num_ranks=2), "0F0 (0F1;0B0) 0B1\n1F0 1F1 1B0 1B1"
    )


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ([PHASES[0], phases()], "mine, row 2: rank 1 has no actions"),
        ([PHASES[0], PHASES[0]], "mine, row 2: stage 0 is on rank 0 and on rank 1"),
        (None, "mine gave None; expected one row per rank"),
        ([["0F0"]], "mine gave 1 rows for 2 ranks"),
        ((["0F0"] for _ in iter(int, 1)), "mine gave more than 2 rows for 2 ranks"),
        ([["0F0"], None], "mine gave None for rank 1; expected a text or a list of actions"),
        ([["0F0"], ["1F0", 3]], "mine gave 3 of type int in the row of rank 1; expected actions"),
        ([["0F0"], ["1X0"]], "mine, row 2: '1X0' is not an action"),
        ("", "mine, row 1: the drawing is empty"),
    ],
)
def test_what_is_no_schedule_is_refused(result, told):
    with pytest.raises(ConfigError, match=told):
        as_schedule(result, "mine", num_ranks=2)


@pytest.mark.parametrize(
    ("act", "place"),
    [(fail_deeply, FIRST_LINE + 1), (fail_in_a_library, fail_in_a_library.__code__.co_firstlineno + 1)],
)
def test_an_error_is_told_with_the_last_line_of_the_file_that_was_called(act, place):
    with pytest.raises(ConfigError, match=rf"test_third_party\.py:{place}: mine failed: \w+: .") as caught:
        run_third_party("mine", act)

    assert caught.value.__cause__ is not None


def test_an_error_before_the_first_line_is_told_with_the_place_that_is_given():
    with pytest.raises(ConfigError, match=r"^here:3: mine failed: TypeError: .*argument"):
        run_third_party("mine", partial(as_schedule, "0F0"), at="here:3")


@pytest.mark.parametrize("error", [ScheduleError("told already"), KeyboardInterrupt()])
def test_errors_of_ours_and_interruptions_pass(error):
    def act():
        raise error

    with pytest.raises(type(error)) as caught:
        run_third_party("mine", act)

    assert caught.value is error


def test_code_that_wants_to_exit_fails():
    with pytest.raises(ConfigError, match="mine failed: SystemExit: 3"):
        run_third_party("mine", lambda: exec("raise SystemExit(3)"))
