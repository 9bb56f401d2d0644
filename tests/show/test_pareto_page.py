"""The picture of step time against memory, as a page."""

import re
from html import unescape
from xml.etree import ElementTree

from penstock.show.pareto import Candidate, Caption
from penstock.show.pareto_page import pareto_page

CANDIDATES = [
    Candidate("zbv", 0.05, 8 * 2**30),
    Candidate("v-zb", 0.05, 8 * 2**30),
    Candidate("<b>", 0.06, 4 * 2**30),
    Candidate("gpipe", 0.07, 16 * 2**30),
]
CAPTION = Caption("8 ranks & more", "peak", is_bytes=True)


def drawing(page):
    return ElementTree.fromstring(re.search(r"<svg.*</svg>", page.decode(), re.DOTALL)[0])


def test_every_point_tells_its_figures_on_hover():
    titles = [title.text for title in drawing(pareto_page(CANDIDATES, CAPTION)).iter("title")]

    assert titles == [
        "gpipe\nstep time 70.0 ms, peak 16.0 GiB",
        "zbv\nv-zb\nstep time 50.0 ms, peak 8.00 GiB",
        "<b>\nstep time 60.0 ms, peak 4.00 GiB",
    ]


def test_names_and_axes_are_text():
    texts = {text.text for text in drawing(pareto_page(CANDIDATES, CAPTION)).iter("text")}

    assert {"zbv", "v-zb", "<b>", "gpipe", "peak (GiB)", "step time (ms)"} <= texts


def test_the_page_needs_no_network_and_follows_the_browser():
    page = pareto_page(CANDIDATES, CAPTION).decode()

    assert "default-src 'none'" in page
    assert not re.findall(r"https?://|@import|url\(|<script|<link|<img|src=", page)
    assert '<html lang="en">' in page
    assert 'data-theme="dark"' in pareto_page(CANDIDATES, CAPTION, theme="dark").decode().splitlines()[1]
    assert "<title>8 ranks & more</title>" in unescape(page)


def test_without_a_front_there_is_no_line():
    page = pareto_page([Candidate("big", 1.0, 9, fits=False)], CAPTION).decode()

    assert 'class="front"' not in page
    assert "big (over the limit)" in page
