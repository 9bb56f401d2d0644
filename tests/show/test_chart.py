"""Pictures: what is in them, read from the SVG, and that large ones stay small."""

import re

import pytest

from penstock.errors import ConfigError
from penstock.show.chart import overlay_chart, timeline_chart
from penstock.simulation import Costs
from tests.show.pictures import texts_of
from tests.show.timelines import UNIT, timeline_of, timeline_with_bars

PNG = b"\x89PNG\r\n\x1a\n"
MAX_SVG_BYTES = 2_000_000


def test_a_timeline_names_its_ranks_kinds_figures_and_units():
    texts = texts_of(timeline_chart(timeline_of(4, 8), more={"gap": "3 %"}))

    assert {"rank 0", "rank 1", "rank 2", "rank 3", *map(str, range(8))} <= set(texts)
    assert {"F forward", "B backward", "bubble", "time (ms)", "(microbatches)"} <= set(texts)
    assert "1f1b, 4 ranks, 8 microbatches, predicted" in texts
    figures = next(text for text in texts if text.startswith("makespan"))
    assert re.fullmatch(r"makespan 3\d\d ms +· +span .* +· +bubble .* +· +peak 4 microbatches  ·  gap 3 %", figures)


def test_the_axis_goes_on_to_the_end_of_the_last_optimizer_step():
    texts = texts_of(timeline_chart(timeline_with_bars()))

    assert {"collective", "optimizer step", "10"} <= set(texts)  # computations end after 9 s, the last step after 11.5
    assert any(text.startswith("makespan 9.00 s") for text in texts)


def test_an_overlay_shows_both_bubbles_and_how_idle_each_rank_was():
    texts = texts_of(overlay_chart(timeline_of(2, 4, "gpipe"), timeline_of(2, 4)))

    figures = next(text for text in texts if text.startswith("measured: bubble"))
    assert re.search(r"measured: bubble 2\d\.\d %.*predicted: bubble 2\d\.\d %", figures)
    assert sum(text.endswith("% idle") for text in texts) == 4
    assert [text for text in texts if text.startswith("rank")] == ["rank 0", "rank 1"]


def test_themes_differ_in_their_paper_and_an_svg_is_set_in_the_fonts_of_its_reader():
    light, dark = (timeline_chart(timeline_of(2, 3), theme=theme) for theme in ("light", "dark"))

    assert (b"#ffffff" in light, b"#14161a" in light) == (True, False)
    assert b"#14161a" in dark
    assert b"font-family: system-ui" in light
    assert b"font-family: 'DejaVu Sans'" not in light


@pytest.mark.parametrize(("format", "begin"), [("svg", b"<?xml"), ("png", PNG)])
def test_an_overlay_is_of_the_format_that_is_asked_for(format, begin):
    assert overlay_chart(timeline_of(2, 8), timeline_of(2, 8), format=format).startswith(begin)


@pytest.mark.parametrize(
    ("name", "shape", "told", "width"),
    [
        ("1f1b", (2, 2), "rank 1", 700),
        ("zbv", (8, 32), "blocks are too narrow or too many for the numbers", 1200),
        pytest.param("1f1b", (130, 140), "a lane is the mean of 3 ranks", 1050, marks=pytest.mark.slow),
        pytest.param("1f1b", (30, 199), "rank 29", 1200, marks=pytest.mark.slow),
        pytest.param("zbv", (64, 512), "too many blocks to draw: a column is", 1050, marks=pytest.mark.slow),
    ],
)
def test_pictures_are_small_files_as_wide_as_their_blocks_need(name, shape, told, width):
    svg = timeline_chart(timeline_of(*shape, name))

    assert len(svg) < MAX_SVG_BYTES
    assert any(text.startswith(told) for text in texts_of(svg))
    assert width <= float(re.findall(r'<svg[^>]*? width="([\d.]+)pt"', svg.decode())[0]) < 1.17 * width


FREE = Costs.uniform(forward=0, backward_input=0, backward_weight=0)


@pytest.mark.parametrize(
    ("timeline", "text"),
    [
        (timeline_of(1, 1, forward_only=True, costs=UNIT), "1f1b, 1 rank, 1 microbatch, predicted"),
        (timeline_of(2, 3, costs=FREE), "time (s)"),
    ],
    ids=["of one block", "that takes no time"],
)
def test_a_step_has_a_picture(timeline, text):
    assert text in texts_of(timeline_chart(timeline))


def test_timelines_of_different_ranks_cannot_be_laid_over_each_other():
    with pytest.raises(ConfigError, match="measured on 2 ranks, predicted for 4"):
        overlay_chart(timeline_of(2, 4), timeline_of(4, 4))
