"""What the pages share."""

import pytest

from penstock.show.html import fill, read, style_of_themes
from penstock.show.palette import THEMES

PLACES = ("attributes", "title", "style", "figures", "legend", "notes", "label", "script", "header", "data")


def test_a_text_that_looks_like_a_place_stays_as_it_is():
    page = fill("page.html", **dict.fromkeys(PLACES, "") | {"title": "{{data}}"})

    assert "<h1>{{data}}</h1>" in page


def test_a_text_that_is_missing_is_found_out():
    with pytest.raises(KeyError):
        fill("page.html", title="alone")


def test_every_theme_has_its_colours_and_dark_browsers_get_the_dark_one():
    light, dark, *named = style_of_themes()

    assert THEMES["light"].bubble in light
    assert dark.startswith("@media (prefers-color-scheme: dark)")
    assert THEMES["dark"].bubble in dark
    assert [rule.partition(" ")[0] for rule in named] == [':root[data-theme="light"]', ':root[data-theme="dark"]']


def test_the_style_sheet_uses_only_colours_of_the_themes():
    known = style_of_themes()[0]
    used = {word.partition(")")[0] for word in read("style.css").split("var(")[1:]}

    assert used
    assert all(f"{variable}:" in known for variable in used)
