"""Tables: whole in a pipe, within the width of a terminal, in color only where it is wanted."""

import re

import pytest

from penstock.tables import Column, Screen, fields_text, table_text

COLUMNS = [
    Column("schedule", is_text=True),
    Column("step time"),
    Column("peak activations", drop_order=1),
    Column("messages sent", drop_order=2),
]
ROWS = [["1f1b", "33 s", "4", "48"], ["interleaved-1f1b:stages_per_rank=2", "28.5 s", "11", "112"]]


def test_a_pipe_and_a_wide_terminal_get_every_column_on_one_line_per_row_whatever_the_environment(monkeypatch):
    for name, value in {"COLUMNS": "20", "FORCE_COLOR": "1", "NO_COLOR": "1", "TTY_COMPATIBLE": "1"}.items():
        monkeypatch.setenv(name, value)

    assert table_text(COLUMNS, ROWS).split("\n") == [
        "schedule                            step time  peak activations  messages sent",
        "──────────────────────────────────────────────────────────────────────────────",
        "1f1b                                     33 s                 4             48",
        "interleaved-1f1b:stages_per_rank=2     28.5 s                11            112",
    ]
    assert table_text(COLUMNS, ROWS, Screen(250)) == table_text(COLUMNS, ROWS)
    assert table_text(COLUMNS[:2], []).split("\n") == ["schedule  step time", "───────────────────"]
    assert "[bold]x[/bold] :warning:" in table_text([Column("a", is_text=True)], [["[bold]x[/bold] :warning:"]])


def test_headings_are_broken_before_a_column_is_left_out():
    lines = table_text(COLUMNS, ROWS, Screen(70)).split("\n")

    assert [line.split() for line in lines[:2]] == [
        ["step", "peak", "messages"],
        ["schedule", "time", "activations", "sent"],
    ]
    assert not any("left out" in line for line in lines)
    assert max(map(len, lines)) <= 70


def test_columns_are_left_out_in_their_order_and_named():
    lines = table_text(COLUMNS, ROWS, Screen(40)).split("\n")

    assert lines[1].split() == ["schedule", "time", "activations"]
    assert lines[-1] == "left out at 40 columns: messages sent"
    assert max(map(len, lines)) <= 40


def test_text_is_folded_and_numbers_are_whole():
    lines = table_text(COLUMNS, ROWS, Screen(24)).split("\n")

    assert lines[4].split() == ["interleaved-1f1b", "28.5", "s"]
    assert lines[4][:16] + lines[5] + lines[6] == "interleaved-1f1b:stages_per_rank=2"


@pytest.mark.parametrize("width", [None, 40, 250])
def test_color_changes_no_character(width):
    plain = table_text(COLUMNS, ROWS, Screen(width), row_styles=["green", ""])
    colored = table_text(COLUMNS, ROWS, Screen(width, has_color=True), row_styles=["green", ""])

    assert "\x1b[" not in plain
    assert "\x1b[32m1f1b" in colored
    shown = re.sub(r"\x1b\[[\d;]*m", "", colored)
    assert [line.rstrip() for line in shown.split("\n")] == plain.split("\n")


def test_prose_is_folded_under_its_indent_in_a_terminal_only():
    text = "a line of prose that is long\n  an indented line of it"

    assert Screen().wrapped(text) == text
    assert Screen(20).wrapped(text).split("\n") == [
        "a line of prose that", "is long", "  an indented line", "  of it",
    ]  # fmt: skip


def test_fields_are_aligned_and_folded():
    fields = [("a", "one two three four"), ("long", "x")]

    assert fields_text(fields) == "a     one two three four\nlong  x"
    assert fields_text(fields, Screen(20)).split("\n") == ["a     one two three", "      four", "long  x"]
