"""Drawings on a screen: the same text in blocks and colors."""

import re

import pytest

from penstock.cli.drawing import COLORS, colored, in_blocks, on_screen, require_readable
from penstock.errors import ConfigError
from penstock.ir.grid import from_grid, to_grid
from penstock.lowering import lower
from penstock.schedules import build
from penstock.tables import Screen

SCHEDULE = build("1f1b", ranks=4, microbatches=8)
DRAWING = to_grid(SCHEDULE)


def plain(text):
    return re.sub(r"\x1b\[\d+m", "", text)


@pytest.mark.parametrize("screen", [Screen(), Screen(250)], ids=["a pipe", "a wide screen"])
def test_a_drawing_that_fits_is_one_block(screen):
    assert on_screen(DRAWING, screen) == DRAWING


@pytest.mark.parametrize(("width", "ranks"), [(40, 4), (80, 12)])
def test_a_wide_drawing_is_cut_by_time_and_reads_back(width, ranks):
    schedule = build("1f1b", ranks=ranks, microbatches=8)

    shown = on_screen(to_grid(schedule), Screen(width, height=1000))

    assert max(map(len, shown.split("\n"))) <= width
    assert from_grid(shown) == schedule


def test_what_the_height_does_not_hold_is_left_out_and_told():
    shown = on_screen(DRAWING, Screen(40, height=12))

    blocks = shown.split("\n\n")
    assert blocks[:1] == ["\n".join(in_blocks(DRAWING, 40)[0])]
    assert " ".join(blocks[1].split("\n")).startswith("# the first 1 of 5 parts; all of it: add | less -S, or")
    assert max(map(len, shown.split("\n"))) <= 40


@pytest.mark.parametrize(
    "drawing", [DRAWING, to_grid(lower(SCHEDULE)), to_grid(build("dualpipe", ranks=4, microbatches=8))]
)
def test_color_changes_no_character(drawing):
    found = on_screen(drawing, Screen(60, has_color=True, height=1000))

    assert plain(found) == on_screen(drawing, Screen(60, height=1000))


def test_actions_have_the_color_of_their_kind_and_go_on_in_it():
    line = colored("rank 0: 0F0 .   0B0 =   0I1 0W1 0SEND_F0 (0F7;7B3)")

    assert line == "rank 0:" + "".join(
        f"{gap}\x1b[{code}m{word}\x1b[0m"
        for gap, code, word in [
            (" ", COLORS["F"], "0F0"),
            (" ", "2", "."),
            ("   ", COLORS["B"], "0B0"),
            (" ", COLORS["B"], "="),
            ("   ", COLORS["I"], "0I1"),
            (" ", COLORS["W"], "0W1"),
            (" ", "2", "0SEND_F0"),
            (" ", COLORS["F"], "(0F7;7B3)"),
        ]
    )


def test_what_is_too_large_to_read_is_refused_with_what_to_ask_for():
    require_readable(build("1f1b", ranks=64, microbatches=512))

    wide = r"^1f1b is too large to read as a grid, with 600 lines of 1821 columns\. List it with --output FILE\.csv, "
    with pytest.raises(ConfigError, match=wide):
        require_readable(build("1f1b", ranks=600, microbatches=8))
    with pytest.raises(ConfigError, match=r"--output FILE\.html, or ask for it with --to grid$"):
        require_readable(lower(build("gpipe", ranks=500, microbatches=400)))
