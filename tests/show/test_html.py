"""What the pages share."""

import pytest

from penstock.show.html import fill, read, style_of_themes
from penstock.show.palette import THEMES


def test_a_text_that_looks_like_a_place_stays_as_it_is():
    page = fill(
        "pareto.html",
        **dict.fromkeys(("attributes", "style", "note", "view", "font_size", "drawing"), ""),
        title="{{note}}",
    )

    assert "<h1>{{note}}</h1>" in page


def test_a_text_that_is_missing_is_found_out():
    with pytest.raises(KeyError):
        fill("pareto.html", title="alone")


def test_every_theme_has_its_colours_and_dark_browsers_get_the_dark_one():
    light, dark, *named = style_of_themes()

    assert THEMES["light"].bubble in light
    assert dark.startswith("@media (prefers-color-scheme: dark)")
    assert THEMES["dark"].bubble in dark
    assert [rule.partition(" ")[0] for rule in named] == [':root[data-theme="light"]', ':root[data-theme="dark"]']


@pytest.mark.parametrize("name", ["style.css", "pareto.css"])
def test_style_sheets_use_only_colours_of_the_themes(name):
    known = style_of_themes()[0]
    used = {word.partition(")")[0] for word in read(name).split("var(")[1:]}

    assert used
    assert all(f"{variable}:" in known for variable in used)
