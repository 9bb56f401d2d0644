"""Pictures: what is in them, read from the SVG, and that large ones stay small."""

import re
from html import unescape
from xml.etree import ElementTree

import pytest

from penstock.errors import ConfigError
from penstock.show.chart import draw_overlay, overlay_chart, timeline_chart
from penstock.simulation import Costs
from tests.show.timelines import UNIT, timeline_of, timeline_with_bars

PNG = b"\x89PNG\r\n\x1a\n"
MAX_SVG_BYTES = 2_000_000


def texts_of(svg):
    """The texts of an SVG; they stay text, so that a reader can search them."""
    ElementTree.fromstring(svg)
    return [unescape(text).strip() for text in re.findall(r"<text[^>]*>(.*?)</text>", svg.decode(), re.DOTALL)]


def test_a_timeline_names_its_ranks_kinds_figures_and_units():
    texts = texts_of(timeline_chart(timeline_of(4, 8)))

    assert {"rank 0", "rank 1", "rank 2", "rank 3"} <= set(texts)
    assert {"F forward", "B backward", "bubble", "time (ms)", "(microbatches)"} <= set(texts)
    assert "1f1b, 4 ranks, 8 microbatches, predicted" in texts
    figures = next(text for text in texts if text.startswith("makespan"))
    assert re.fullmatch(
        r"makespan 3\d\d ms +· +span 3\d\d ms +· +bubble fraction \d\d\.\d % +· +peak 4 microbatches", figures
    )


def test_a_title_and_further_figures_may_be_given():
    texts = texts_of(timeline_chart(timeline_of(2, 2), title="costs of today", more={"gap": "3 %"}))

    (figures,) = [text for text in texts if text.startswith("makespan")]
    assert figures.endswith("  ·  gap 3 %")
    assert "costs of today" in texts


def test_blocks_are_numbered_with_their_microbatch():
    texts = texts_of(timeline_chart(timeline_of(2, 8)))

    assert all(texts.count(str(microbatch)) >= 4 for microbatch in range(8))  # F and B on both ranks


def test_the_axis_goes_on_to_the_end_of_the_last_optimizer_step():
    texts = texts_of(timeline_chart(timeline_with_bars()))

    assert {"collective", "optimizer step", "10"} <= set(texts)  # computations end after 9 s, the last step after 11.5
    assert any(text.startswith("makespan 9.00 s") for text in texts)


def test_memory_is_drawn_in_bytes_where_these_are_known_and_only_kinds_that_are_there_are_in_the_legend():
    texts = texts_of(timeline_chart(timeline_of(2, 4, costs=Costs.uniform(activation_bytes=(2**20,)))))

    assert "(MiB)" in texts
    assert not {"I input gradient", "W weight gradient"} & set(texts)


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


@pytest.mark.slow
@pytest.mark.parametrize("format", ["svg", "png"])
def test_the_same_timeline_gives_the_same_bytes(format):
    first, second = (timeline_chart(timeline_of(3, 6, "dualpipe-v", UNIT), format=format) for _ in range(2))

    assert first == second


def test_the_suffix_tells_the_format(tmp_path):
    for name in ("overlay.SVG", "overlay.png"):
        draw_overlay(timeline_of(2, 8), timeline_of(2, 8), tmp_path / name)

    assert "rank 1" in texts_of((tmp_path / "overlay.SVG").read_bytes())
    assert (tmp_path / "overlay.png").read_bytes().startswith(PNG)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        ("zbv", (8, 32), "blocks are too narrow or too many for the numbers"),
        ("1f1b", (30, 199), "rank 29"),
        ("zbv", (64, 512), "too many blocks to draw: a column is"),
        ("1f1b", (130, 140), "a lane is the mean of 3 ranks"),
    ],
)
def test_large_timelines_stay_small_files(name, shape, told):
    svg = timeline_chart(timeline_of(*shape, name))

    assert len(svg) < MAX_SVG_BYTES
    assert any(text.startswith(told) for text in texts_of(svg))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "at_least", "below"),
    [
        pytest.param("1f1b", (2, 2), 700, 800, id="few-blocks"),
        pytest.param("zbv", (64, 512), 1050, 1200, id="merged-blocks"),
        pytest.param("zbv", (8, 32), 1200, 1400, id="as-wide-as-a-screen"),
    ],
)
def test_a_picture_is_as_wide_as_its_blocks_need(name, shape, at_least, below):
    (width,) = re.findall(r'<svg[^>]*? width="([\d.]+)pt"', timeline_chart(timeline_of(*shape, name)).decode())

    assert at_least <= float(width) < below


@pytest.mark.slow
def test_a_picture_has_no_number_where_only_some_would_fit():
    assert not {"7", "31"} & set(texts_of(timeline_chart(timeline_of(8, 32, "zbv"))))


def test_memory_is_counted_in_microbatches_whatever_stages_a_rank_has():
    """As `penstock compare` counts: two stages of a rank hold half of a microbatch's activations each."""
    timeline = timeline_of(4, 8, "zbv")

    assert max(timeline.peak_activations) == 8
    assert any(text.endswith("peak 4 microbatches") for text in texts_of(timeline_chart(timeline)))


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


def test_an_unknown_suffix_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"\.jpeg"):
        draw_overlay(timeline_of(2, 4), timeline_of(2, 4), tmp_path / "overlay.jpeg")
