"""The picture of a sweep: one line per schedule over the size."""

import re

import pytest

from penstock.errors import ConfigError
from penstock.show.pareto import Caption
from penstock.show.sweep_lines import COLORS, SweptPoint, sweep_picture
from tests.show.pictures import texts_of

CAPTION = Caption("4 ranks & more", "peak", warning="for 16 microbatches")
LINES = {
    "1f1b": [SweptPoint(4, 0.042, 4.0), SweptPoint(8, 0.033, 4.0), SweptPoint(16, 0.0285, 4.0)],
    "<zbv>": [SweptPoint(4, 0.03, 4.0), SweptPoint(8, 0.0255, 4.0)],
}


def draw(**options):
    return sweep_picture(LINES, "microbatches", CAPTION, **options)


def corners_of(picture, gid):
    """The corners of both lines of a schedule: in the panel of memory and in that of time."""
    paths = re.findall(rf'<g id="{gid}">\s*<path d="([^"]*)"', picture.decode())
    return [[tuple(map(float, each)) for each in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)] for path in paths]


def test_it_names_schedules_axes_and_title():
    names = {"1f1b", "<zbv>", "microbatches", "step time (ms)", "peak", "4 ranks & more", "for 16 microbatches"}
    assert names <= set(texts_of(draw()))


def test_points_of_equal_memory_are_next_to_each_other_and_not_above():
    memory, time = corners_of(draw(), "line-0")

    across = [place[0] for place in time]
    assert across == sorted(set(across))
    assert len(across) == 3
    assert [place[0] for place in memory] == across
    assert len({place[1] for place in memory}) == 1
    assert time[0][1] < time[1][1] < time[2][1]  # downward is faster


@pytest.mark.parametrize(("format", "begin"), [("svg", b"<?xml"), ("html", b"<!DOCTYPE html>"), ("png", b"\x89PNG")])
def test_the_same_lines_give_the_same_bytes_of_their_format(format, begin):
    first, second = (draw(format=format, theme="dark") for _ in range(2))

    assert first.startswith(begin)
    assert first == second


def test_a_page_needs_no_network():
    page = draw(format="html").decode()

    assert "default-src 'none'" in page
    fixed = set(re.findall(r": (#[0-9a-f]{6})", page[page.index("<svg") :]))
    assert fixed <= {color.lower() for color in COLORS}, "all else follows the theme"


def test_nothing_to_draw_is_refused():
    with pytest.raises(ConfigError, match="no schedule can be compared"):
        sweep_picture({}, "ranks", CAPTION)


def test_lines_of_equal_values_take_turns_and_the_axis_of_a_constant_begins_at_zero():
    equal = {
        "a": [SweptPoint(4, 2.0, 4.0), SweptPoint(8, 1.0, 4.0)],
        "b": [SweptPoint(4, 3.0, 4.0), SweptPoint(8, 1.0, 4.0)],
    }

    picture = sweep_picture(equal, "microbatches", CAPTION).decode()

    dashes = {
        gid: re.findall(r"stroke-dasharray: ([\d.,]+); stroke-dashoffset: ([-\d.]+)", part)
        for gid, part in lines_of(picture)
    }
    assert len(dashes["line-0"]) == len(dashes["line-1"]) == 1  # in the panel of memory, and not in that of time
    assert dashes["line-0"][0][0] == dashes["line-1"][0][0]
    assert dashes["line-0"][0][1] != dashes["line-1"][0][1]
    assert {"0", "1", "2", "3", "4", "5"} <= set(texts_of(picture.encode()))


def lines_of(picture):
    """Both drawings of each line, in one text, by its name."""
    found = {}
    for gid, part in re.findall(r'<g id="(line-\d)">(.*?)</g>', picture, re.DOTALL):
        found[gid] = found.get(gid, "") + part
    return found.items()
