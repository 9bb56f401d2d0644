"""Colours: told apart by every reader, on both themes, and with numbers that can be read."""

from itertools import combinations, product

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.ir.action import Kind
from penstock.show.palette import (
    COLLECTIVE_COLOUR,
    COPY_COLOUR,
    DARK_INK,
    LIGHT_INK,
    THEMES,
    blend,
    block_colours,
    find_theme,
    ink_on,
    paler,
    to_hex,
    to_rgb,
)

# How people with a colour blindness see linear RGB (Machado, Oliveira and Fernandes 2009, severity 1).
EYES = {
    "usual": np.eye(3),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritan": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_CONES = np.array([[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]])
TO_LAB = np.array([[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]])


def linear(colour):
    channels = np.array(to_rgb(colour))
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def difference(first, second, eye):
    """How different two colours look, in hundredths of OKLab; below about 2 they look alike."""
    seen = [TO_LAB @ np.cbrt(TO_CONES @ np.clip(EYES[eye] @ linear(colour), 0, 1)) for colour in (first, second)]
    return 100 * float(np.linalg.norm(seen[0] - seen[1]))


def contrast(first, second):
    luminances = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (first, second))
    return (luminances[1] + 0.05) / (luminances[0] + 0.05)


def blocks(num_shades):
    return [colour for ramp in block_colours(num_shades).values() for colour in ramp]


ANY = [colour for count in (1, 2, 3) for colour in blocks(count)]
PAPERS = [colour for theme in THEMES.values() for colour in (theme.background, theme.bubble, theme.ink)]
BUBBLES = [theme.bubble for theme in THEMES.values()]
FORWARDS, BACKWARDS = (block_colours(6)[kind] for kind in (Kind.FORWARD, Kind.BACKWARD))


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize(
    ("pairs", "least"),
    [
        pytest.param([*combinations(blocks(1), 2)], 9, id="kinds"),
        pytest.param([*combinations(blocks(2), 2)], 7, id="kinds and shades on ranks of two stages"),
        pytest.param([*product(FORWARDS, BACKWARDS)], 10, id="forward and backward in any shades"),
        pytest.param([*product(blocks(3), BUBBLES)], 3, id="blocks and bubbles"),
        pytest.param([*product([COLLECTIVE_COLOUR], ANY + PAPERS)], 10, id="collectives and what they may lie on"),
        pytest.param([*product([COPY_COLOUR], [*ANY, *PAPERS, COLLECTIVE_COLOUR])], 9, id="copies and the same"),
        *(pytest.param([*combinations(each.runs, 2)], 7, id=f"runs, {name}") for name, each in THEMES.items()),
    ],
)
def test_every_eye_tells_colours_apart(eye, pairs, least):
    assert min(difference(*pair, eye) for pair in pairs) > least


@pytest.mark.parametrize("theme", THEMES.values(), ids=list(THEMES))
def test_the_usual_eye_tells_the_curves_of_runs_well_apart(theme):
    assert min(difference(*pair, "usual") for pair in combinations(theme.runs, 2)) > 20


@pytest.mark.parametrize("theme", THEMES.values(), ids=list(THEMES))
def test_texts_have_contrast(theme):
    assert contrast(theme.ink, theme.background) > 12
    assert contrast(theme.faint, theme.background) > 4.5
    assert min(contrast(colour, theme.background) for colour in theme.ranks) > 2.5
    assert min(contrast(colour, theme.background) for colour in theme.runs) >= 2.9


@pytest.mark.parametrize("num_shades", [1, 2, 3, 4])
def test_numbers_on_blocks_can_be_read(num_shades):
    assert min(contrast(colour, ink_on(colour)) for colour in blocks(num_shades)) > 4.5


def test_shades_run_from_deep_to_pale_and_a_single_stage_has_the_usual_colour():
    deep, usual, pale = block_colours(3)[Kind.FORWARD]

    assert block_colours(1)[Kind.FORWARD] == (usual,)
    assert block_colours(2)[Kind.FORWARD] == (deep, pale)
    assert sum(to_rgb(deep)) < sum(to_rgb(usual)) < sum(to_rgb(pale))


def test_ink_is_what_differs_most():
    assert ink_on("#000000") == LIGHT_INK
    assert ink_on("#FFFFFF") == DARK_INK


def test_colours_are_mixed_in_proportion():
    assert to_hex(blend(["#000000", "#804020"], 0.5)) == "#402010"
    assert to_hex(blend(["#000000", "#804020", "#FFFFFF"], 0.5)) == "#804020"
    assert paler("#804020", "#000000", 0.0) == "#804020"
    assert paler("#804020", "#000000", 1.0) == "#000000"


def test_an_unknown_theme_is_refused_with_the_nearest_one():
    assert find_theme("dark") is THEMES["dark"]
    with pytest.raises(ConfigError, match=r"theme: 'drak'; known: light, dark.* Did you mean 'dark'"):
        find_theme("drak")
