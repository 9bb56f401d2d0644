"""Sheets: sizes, and files that are the same twice."""

import sys

import pytest

from penstock.errors import ConfigError
from penstock.show.palette import THEMES
from penstock.show.sheet import MAX_SCALE, Sheet, scale_of

LIGHT = THEMES["light"]
PNG = b"\x89PNG\r\n\x1a\n"


def sheet_with_a_line(format):
    sheet = Sheet.of(8.0, 4.0, LIGHT, format)
    sheet.add_axes(1.0, 2.0).plot([0, 1], [0, 1])
    sheet.write("a title that costs $5 and $6", 0.3, size=13, is_bold=True)
    return sheet


@pytest.mark.parametrize(("format", "part"), [("svg", b">a title that costs $5 and $6</text>"), ("png", PNG)])
def test_the_same_drawing_gives_the_same_bytes_in_which_text_stays_text(format, part):
    first, second = (sheet_with_a_line(format).to_bytes() for _ in range(2))

    assert first == second
    assert part in first


def test_wide_sheets_have_larger_texts():
    assert scale_of(8.0) == scale_of(13.0) == 1.0
    assert scale_of(19.5) == 1.5
    assert scale_of(100.0) == MAX_SCALE


def test_axes_are_as_wide_as_was_asked_for():
    sheet = Sheet.of(26.0, 4.0, LIGHT, "svg")

    assert sheet.add_axes(1.0, 2.0).get_position().width * sheet.width == pytest.approx(26.0)


def test_a_long_title_gets_smaller_instead_of_leaving_the_sheet():
    sheet = Sheet.of(8.0, 4.0, LIGHT, "svg")

    sheet.write("short", 0.3, size=13)
    sheet.write("word " * 60, 0.6, size=13)

    short, long = sheet.figure.texts
    assert short.get_fontsize() == 13
    assert long.get_window_extent().x1 <= sheet.figure.bbox.x1


def test_an_unknown_format_is_refused():
    with pytest.raises(ConfigError, match="format: unknown format 'pdf'; a chart is svg or png"):
        Sheet.of(8.0, 4.0, LIGHT, "pdf")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(ConfigError, match=r"pip install '\.\[plot\]' in Penstock's clone"):
        Sheet.of(8.0, 4.0, LIGHT, "svg")
