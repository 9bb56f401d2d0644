"""The picture of step time against memory, as SVG and PNG."""

import re
from xml.etree import ElementTree

import pytest

from penstock.errors import ConfigError
from penstock.show.pareto import HOW_TO_READ, Candidate, Caption
from penstock.show.pareto_chart import pareto_chart

CANDIDATES = [Candidate("zbv", 0.05, 8), Candidate("v-min", 0.06, 4), Candidate("gpipe", 0.07, 16)]
CAPTION = Caption("8 ranks", "activations")


@pytest.mark.slow
def test_it_holds_names_units_and_how_to_read_it():
    svg = pareto_chart(CANDIDATES, CAPTION).decode()

    ElementTree.fromstring(svg)
    texts = set(re.findall(r"<text[^>]*>(.*?)</text>", svg))
    assert {"zbv", "v-min", "gpipe", "8 ranks", "activations", "step time (ms)", HOW_TO_READ} <= texts


def test_beaten_points_are_pale():
    svg = pareto_chart(CANDIDATES, CAPTION).decode().lower()

    assert svg.count("fill: #0072b2") == 2
    assert svg.count("fill: #e8e9ed") == 1


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_png_is_a_png(theme):
    assert pareto_chart(CANDIDATES, CAPTION, format="png", theme=theme).startswith(b"\x89PNG")


def test_the_same_candidates_give_the_same_bytes():
    assert pareto_chart(CANDIDATES, CAPTION) == pareto_chart(CANDIDATES, CAPTION)


def test_unknown_formats_are_refused():
    with pytest.raises(ConfigError, match="'pdf' is no format of a chart"):
        pareto_chart(CANDIDATES, CAPTION, format="pdf")
