"""The picture of step time against memory: what its SVG holds, its PNG, and the page around it."""

import re
from dataclasses import replace
from html import unescape
from xml.etree import ElementTree

import pytest

from penstock.errors import ConfigError
from penstock.show.palette import THEMES
from penstock.show.pareto import GREY_TO_READ, HOW_TO_READ, Candidate, Caption, LowerBound, pareto_picture
from tests.show.pictures import texts_of

CAPTION = Caption("8 ranks & more", "activations")
SMALL, BETWEEN, LARGE = (
    Candidate("small", 0.09, 2, True),
    Candidate("<b>", 0.06, 4, True),
    Candidate("large", 0.05, 8, True),
)
BEATEN = Candidate("beaten", 0.07, 4, False)
FOUR = [SMALL, LARGE, BETWEEN, BEATEN]
SVG = "{http://www.w3.org/2000/svg}"


def points_of(picture):
    """The group of each point, by the first of its names."""
    text = picture.decode()
    root = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + len("</svg>")])
    groups = [group for group in root.iter(f"{SVG}g") if group.get("id", "").startswith("point-")]
    return {group.find(f"{SVG}title").text.partition("\n")[0]: group for group in groups}


def place_of(group):
    """Where a point is, in pixels to the right and downward."""
    use = next(group.iter(f"{SVG}use"))
    return float(use.get("x")), float(use.get("y"))


def corners_in(path):
    """The corners of a line, in the same pixels."""
    return [tuple(map(float, corner)) for corner in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)]


def test_it_holds_names_units_how_to_read_it_and_a_warning():
    texts = set(texts_of(pareto_picture(FOUR, replace(CAPTION, warning="unequal work"))))

    names = {"small", "<b>", "large", "beaten"}
    assert names | {"8 ranks & more", "activations", "step time (ms)", HOW_TO_READ, "unequal work"} <= texts


def test_points_of_the_front_are_coloured_and_named_first_and_the_others_pale():
    points = points_of(pareto_picture(FOUR, CAPTION))

    accent, pale = THEMES["light"].ranks[1].lower(), THEMES["light"].bubble.lower()
    fills = {
        name: re.search(r"fill: (#\w+)", next(group.iter(f"{SVG}use")).get("style"))[1]
        for name, group in points.items()
    }
    assert fills == {"small": accent, "<b>": accent, "large": accent, "beaten": pale}
    order = {group.get("id"): name for name, group in points_of(pareto_picture(FOUR, CAPTION)).items()}
    assert [order[f"point-{index}"] for index in range(4)] == ["large", "<b>", "small", "beaten"]


def test_faster_is_lower_smaller_is_further_left_and_the_front_is_a_staircase_through_its_points():
    picture = pareto_picture(FOUR, CAPTION)
    small, between, large, beaten = (place_of(points_of(picture)[name]) for name in ("small", "<b>", "large", "beaten"))

    assert large[1] > between[1] > beaten[1] > small[1]
    assert small[0] < between[0] == beaten[0] < large[0]
    line = re.search(r'<path d="([^"]*)" clip-path="[^"]*" style="fill: none; stroke: #0072b2', picture.decode())[1]
    assert [pytest.approx(corner) for corner in corners_in(line)] == [
        small, (between[0], small[1]), between, (large[0], between[1]), large,
    ]  # fmt: skip


def test_a_pointer_is_told_all_names_and_figures():
    twins = [Candidate(f"twin {number}", 0.05, 8, True) for number in range(7)]

    picture = pareto_picture(twins, Caption("", "peak"))

    (group,) = points_of(picture).values()
    names = "\n".join(f"twin {number}" for number in range(7))
    assert group.find(f"{SVG}title").text == f"{names}\nstep time: 50.0 ms\npeak: 8"
    assert [text for text in texts_of(picture) if "twin" in text or "more" in text] == [
        "twin 0", "twin 1", "twin 2", "twin 3", "and 3 more",
    ]  # fmt: skip


def test_names_that_find_no_room_are_left_out_and_counted():
    crowd = [Candidate(f"schedule of a long name {n}", 10 + n % 10, 10 + n // 10, False) for n in range(80)]

    picture = pareto_picture(crowd, CAPTION)

    num_named = sum("schedule" in text and text[-1].isdigit() for text in texts_of(picture))
    assert 0 < num_named < 80
    assert f"{HOW_TO_READ}; {80 - num_named} names left out" in texts_of(picture)
    assert THEMES["light"].ranks[1].lower() not in picture.decode(), "there is no front"


def test_far_apart_values_are_shown_by_factors():
    wide = [Candidate(name, 1.0, memory, False) for name, memory in (("a", 1), ("b", 10), ("c", 100))]

    picture = pareto_picture(wide, CAPTION)

    low, middle, high = (place_of(points_of(picture)[name])[0] for name in "abc")
    assert middle - low == pytest.approx(high - middle, abs=0.02)
    assert {"1", "2", "5", "10", "20", "50", "100"} <= set(texts_of(picture))


def test_below_the_bounds_is_a_grey_area_up_to_the_memory_that_they_hold_for():
    bounds = [LowerBound(3, 0.06), LowerBound(5, 0.05), LowerBound(8, 0.045)]

    picture = pareto_picture(FOUR, CAPTION, bounds=bounds)

    (path,) = re.findall(r'<g id="bound">\s*<path d="([^"]*)"', picture.decode())
    corners = corners_in(path)
    x4, y6 = place_of(points_of(picture)["<b>"])
    x8, y5 = place_of(points_of(picture)["large"])
    x3, x5 = x4 - (x8 - x4) / 4, x4 + (x8 - x4) / 4
    assert [x for x, _ in corners[1:]] == pytest.approx([x3, x3, x5, x5, x8], abs=0.01)
    assert [y for _, y in corners[:4]] == pytest.approx([y6, y6, y5, y5], abs=0.01)
    assert f"{HOW_TO_READ}; {GREY_TO_READ}" in texts_of(picture)
    assert "grey" not in pareto_picture(FOUR, CAPTION).decode()


def test_bounds_of_more_memory_than_any_candidate_has_do_not_stretch_the_axis():
    near, far = (pareto_picture(FOUR, CAPTION, bounds=[LowerBound(most, 0.03)]) for most in (8, 800))

    assert [place_of(group) for group in points_of(near).values()] == [
        place_of(group) for group in points_of(far).values()
    ]


def test_names_are_not_written_over_the_bound():
    two = [Candidate("here", 0.06, 4, True), Candidate("there", 0.05, 8, True)]

    def height_of_name(bound_s):
        picture = pareto_picture(two, CAPTION, bounds=[LowerBound(8, bound_s)]).decode()
        return float(re.search(r'<g id="name-1">.*? y="([\d.]+)"', picture, re.DOTALL)[1])

    assert height_of_name(0.055) != height_of_name(0.06)  # to the left of its point, where the second bound is


def test_what_is_short_may_be_another_time():
    picture = pareto_picture(FOUR, Caption("", "peak", time_name="span"))

    assert "span (ms)" in texts_of(picture)
    assert "span: 50.0 ms" in points_of(picture)["large"].find(f"{SVG}title").text
    assert "<th>span</th>" in pareto_picture(FOUR, Caption("", "", time_name="span"), format="html").decode()


@pytest.mark.parametrize(("format", "begin"), [("svg", b"<?xml"), ("html", b"<!DOCTYPE html>"), ("png", b"\x89PNG")])
def test_the_same_candidates_give_the_same_bytes_of_their_format(format, begin):
    first, second = (pareto_picture(FOUR, CAPTION, format=format, theme="dark") for _ in range(2))

    assert first.startswith(begin)
    assert first == second


def test_the_page_needs_no_network_follows_the_browser_in_its_colours_and_lists_the_figures_the_fastest_first():
    page, dark = (pareto_picture(FOUR, CAPTION, format="html", theme=theme).decode() for theme in (None, "dark"))

    assert "default-src 'none'" in page
    assert not re.findall(r"@import|url\((?!#)|<script|<link|<img|src=|href=\"(?!#)", page)
    assert '<html lang="en">' in page
    assert '<html lang="en" data-theme="dark">' in dark
    assert "<title>8 ranks &amp; more</title>" in page
    assert set(points_of(page.encode())) == {"small", "<b>", "large", "beaten"}
    page = pareto_picture(FOUR, CAPTION, format="html").decode()
    drawing = page[page.index("<svg") :]
    assert not re.findall(r": #[0-9a-f]{6}", drawing)
    assert set(re.findall(r"var\(--(\w+)\)", drawing)) == {"background", "ink", "faint", "bubble", "line", "accent"}
    rows = re.findall(r'<tr class="(.*?)"><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>', page)
    fastest = sorted(FOUR, key=lambda one: (one.step_s, one.memory))
    assert [unescape(name) for _, name, _, _ in rows] == [one.label for one in fastest]
    assert [kind == "front" for kind, *_ in rows] == [one.is_on_front for one in fastest]
    assert [float(memory) for *_, memory in rows] == [one.memory for one in fastest]


@pytest.mark.parametrize(
    ("candidates", "options", "told"),
    [
        ([], {}, "no schedule can be compared"),
        (FOUR, {"format": "pdf"}, "unknown format 'pdf'"),
        (FOUR, {"format": "html", "theme": "blue"}, "theme: 'blue'"),
    ],
)
def test_nothing_to_compare_and_unknown_formats_and_themes_are_refused(candidates, options, told):
    with pytest.raises(ConfigError, match=told):
        pareto_picture(candidates, CAPTION, **options)
