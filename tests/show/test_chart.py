"""Pictures: what is in them, read from the SVG, and that large ones stay cheap."""

import re
import sys
from html import unescape

import pytest

from penstock.errors import ConfigError
from penstock.show.chart import MAX_NUMBERED_BLOCKS, draw_overlay, draw_timeline
from penstock.simulate import Costs
from tests.show.timelines import timeline_of

PNG = b"\x89PNG\r\n\x1a\n"


def texts_of(path):
    """The texts of an SVG; they stay text, so that a reader can search them."""
    return [unescape(text).strip() for text in re.findall(r"<text[^>]*>(.*?)</text>", path.read_text(), re.DOTALL)]


def test_a_timeline_names_its_ranks_kinds_figures_and_units(tmp_path):
    path = tmp_path / "timeline.svg"

    draw_timeline(timeline_of(4, 8), path)

    texts = texts_of(path)
    assert {"rank 0", "rank 1", "rank 2", "rank 3"} <= set(texts)
    assert {"F forward", "B backward", "bubble", "time (ms)"} <= set(texts)
    assert "1f1b, 4 ranks, 8 microbatches, predicted" in texts
    figures = next(text for text in texts if text.startswith("makespan"))
    assert re.fullmatch(r"makespan 3\d\d ms +span 3\d\d ms +bubble \d\d\.\d % +peak 4 activations", figures)


def test_blocks_are_numbered_with_their_microbatch(tmp_path):
    path = tmp_path / "timeline.svg"

    draw_timeline(timeline_of(2, 8), path)

    texts = texts_of(path)
    assert all(texts.count(str(microbatch)) >= 4 for microbatch in range(8))  # F and B on both ranks


def test_kinds_that_are_not_there_are_not_in_the_legend(tmp_path):
    path = tmp_path / "timeline.svg"

    draw_timeline(timeline_of(2, 4), path)

    assert not {"I backward, input part", "W backward, weight part"} & set(texts_of(path))


def test_memory_is_drawn_in_bytes_where_these_are_known(tmp_path):
    path = tmp_path / "timeline.svg"
    costs = Costs.uniform(activation_bytes=(2**20,))

    draw_timeline(timeline_of(2, 4, costs=costs), path)

    assert any("MiB" in text for text in texts_of(path))


def test_an_overlay_shows_both_bubbles_and_how_idle_each_rank_was(tmp_path):
    path = tmp_path / "overlay.svg"

    draw_overlay(timeline_of(2, 4, "gpipe"), timeline_of(2, 4), path)

    texts = texts_of(path)
    figures = next(text for text in texts if text.startswith("predicted: bubble"))
    assert re.search(r"predicted: bubble 2\d\.\d %.*measured: bubble 2\d\.\d %", figures)
    assert sum(text.endswith("% idle") for text in texts) == 4


def test_a_png_is_a_png(tmp_path):
    draw_overlay(timeline_of(2, 8), timeline_of(2, 8), tmp_path / "overlay.png")

    assert (tmp_path / "overlay.png").read_bytes().startswith(PNG)


def test_a_large_timeline_is_drawn_without_numbers(tmp_path):
    path = tmp_path / "large.svg"
    timeline = timeline_of(16, 100)
    assert timeline.program.is_compute.sum() > MAX_NUMBERED_BLOCKS

    draw_timeline(timeline, path)

    assert "99" not in texts_of(path)


def test_timelines_of_different_ranks_cannot_be_laid_over_each_other(tmp_path):
    with pytest.raises(ConfigError, match="measured on 2 ranks, predicted for 4"):
        draw_overlay(timeline_of(2, 4), timeline_of(4, 4), tmp_path / "overlay.png")


def test_an_unknown_suffix_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"\.jpeg"):
        draw_timeline(timeline_of(2, 4), tmp_path / "timeline.jpeg")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(ConfigError, match=r"pip install '?penstock\[plot\]"):
        draw_timeline(timeline_of(2, 4), tmp_path / "timeline.png")
