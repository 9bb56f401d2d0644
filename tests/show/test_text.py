"""Figures as text."""

import pytest

from penstock.show.text import (
    count_of,
    format_seconds,
    format_share,
    summary_table,
)
from penstock.simulation import Costs
from tests.show.timelines import timeline_of


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0.0, "0.00 s"),
        (1.234, "1.23 s"),
        (0.99996, "1.00 s"),
        (0.0123, "12.3 ms"),
        (45.6e-6, "45.6 µs"),
        (7e-9, "7.00 ns"),
        (1234.5, "1234 s"),
    ],
)
def test_seconds_have_three_digits_and_their_natural_unit(duration_s, text):
    assert format_seconds(duration_s) == text


def test_numbers_stand_with_their_nouns():
    assert [count_of(1, "rank"), count_of(2, "rank"), count_of(3, "microbatch")] == [
        "1 rank",
        "2 ranks",
        "3 microbatches",
    ]


def test_a_share_is_a_percentage():
    assert format_share(0.125) == "12.5 %"


def test_the_table_shows_the_figures_of_each_timeline_and_rank():
    lines = summary_table({"predicted": timeline_of(2, 4), "eager": timeline_of(2, 4, "gpipe")}).splitlines()

    assert lines[0].split() == ["timeline", "makespan", "span", "bubble", "fraction", "bubble", "rate"]
    assert lines[2].split() == ["predicted", "154", "ms", "154", "ms", "22.1", "%", "22.1", "%"]
    assert lines[5].split() == ["rank", "timeline", "work", "idle", "peak", "activations"]
    assert lines[7].split() == ["0", "predicted", "120", "ms", "34.0", "ms", "2"]
    assert [line.split()[-1] for line in lines[7:]] == ["2", "4", "1", "4"]
    assert len(set(map(len, lines[7:]))) == 1


def test_bytes_are_shown_where_they_are_known():
    costs = Costs.uniform(activation_bytes=(2**20,), weight_context_bytes=(2**19,))

    table = summary_table({"predicted": timeline_of(2, 4, costs=costs)})

    assert "2.00 MiB" in table
