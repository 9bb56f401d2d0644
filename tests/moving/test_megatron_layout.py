"""Megatron's layout strings are read, written, drawn and turned into a split, and wrong ones are told by column."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.errors import FormatError, PartitionError
from penstock.moving.megatron_layout import Layout
from tests.support.local_pipelines import error_of


@pytest.mark.feature("X14")
def test_the_layout_of_the_documents_has_its_stages():
    layout = Layout.parse("Et*3|(tt|)*29,m|L")

    assert layout.num_stages == 32
    assert layout.stages[:3] == ("Ettt", "tt", "tt")
    assert layout.stages[-3:] == ("tt", "m", "L")
    assert [layout.count(letter) for letter in "EtmL"] == [1, 61, 1, 1]
    assert layout.split() == [4, *[2] * 29, 1, 1]
    assert str(layout) == "Et*3|(t*2|)*29m|L"


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("EtL", ("EtL",)),
        ("E|t|L", ("E", "t", "L")),
        ("E, t | t, L", ("Et", "tL")),
        ("Et|(t|)*2L", ("Et", "t", "t", "L")),
        ("E((t*2|)*2t|)*2L", ("E" + "tt", "tt", "t", "tt", "tt", "t", "L")),
        ("E||t|L", ("E", "", "t", "L")),
    ],
)
def test_stars_groups_and_commas_are_read(text, stages):
    assert Layout.parse(text).stages == stages


@pytest.mark.feature("X14")
@pytest.mark.slow
@example([0, 0, 0], 0)  # the longest run is one of bars alone
@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.integers(0, 2))
def test_what_is_written_is_read_back(numbers, num_predictions):
    stages = ["t" * number for number in numbers]
    layout = Layout(("E" + stages[0], *stages[1:], "m" * num_predictions + "L"))

    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "problem", "column"),
    [
        ("Et|x|L", "'x' is no letter of EtmL", 4),
        ("Et*|L", "'*' is no letter", 3),
        ("E(t|L", "this ( is never closed", 2),
        ("Et)|L", "this ) closes nothing", 3),
        ("*3EtL", "nothing stands before this star", 1),
        ("E|*3L", "nothing stands before this star", 3),
        ("Et*0L", "0 times", 3),
        ("Et*99999999L", "99999999 times", 3),
        ("t|L", "0 of E (embedding)", 1),
        ("EtL|L", "2 of L (loss)", 1),
        ("Etmt|L", "t comes after m", 1),
        ("", "0 of E (embedding)", 1),
    ],
)
def test_wrong_layouts_are_told_by_column(text, problem, column):
    error = error_of(Layout.parse, text)

    assert isinstance(error, FormatError)
    assert problem in error.problem
    assert error.column == column


def test_an_empty_stage_has_no_split():
    with pytest.raises(PartitionError, match="stage 1 of the layout E\\|\\|t\\|L is empty"):
        Layout.parse("E||t|L").split()


def test_the_table_shows_which_rank_has_what():
    assert Layout.parse("Et|t*2||tL").table(2).splitlines() == [
        "rank  part 0  part 1",
        "0     Et      -",
        "1     t*2     tL",
    ]
    with pytest.raises(PartitionError, match="4 stages do not divide over 3 ranks"):
        Layout.parse("E|t|t|L").table(3)
