"""Names and colours of kinds, one ramp from the first stage of a rank to its last, and the light and the dark theme.

Kinds differ in hue and in lightness, so that readers with any common kind of colour blindness can tell them apart on
ranks of up to two stages; a test computes how far apart they see them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import ConfigError, nearest
from penstock.ir.operations import OPERATIONS, Kind, Op

Rgb = tuple[float, ...]
"""Red, green and blue, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Theme:
    """The colours of everything in a picture that is not a block."""

    name: str
    background: str
    ink: str
    faint: str
    bubble: str
    line: str
    ranks: tuple[str, ...]
    """Stops of the ramp for the memory curves, from the first rank to the last."""
    runs: tuple[str, ...]
    """Colours of curves without an order, such as several runs'; a test computes how far apart every eye sees them."""


THEMES = {
    theme.name: theme
    for theme in (
        Theme(
            "light", "#FFFFFF", "#1F2328", "#646973", "#E8E9ED", "#D5D7DD",
            ranks=("#0B3C68", "#0072B2", "#009E73", "#D98200"),
            runs=("#0072B2", "#CC4A14", "#84A03C", "#4A1258", "#C870E8"),
        ),
        Theme(
            "dark", "#14161A", "#E8E9EC", "#9DA2AD", "#32363F", "#3E424C",
            ranks=("#8FB8FF", "#3FA7E8", "#3CC79A", "#F5B041"),
            runs=("#4AA8F0", "#F28A3D", "#1F8434", "#C8F59A", "#A83FEF"),
        ),
    )
}  # fmt: skip

COLLECTIVE_COLOUR, COPY_COLOUR = "#9933FF", "#9C2400"
"""Colours of bars over blocks of any kind; optimizer steps, which cover no block, are drawn in the theme's ink."""
VARIABLES = ("background", "ink", "faint", "bubble", "line")
"""Colours of a theme that the style sheets of pages have as variables."""
DARK_INK, LIGHT_INK = "#101214", "#FFFFFF"
"""Colours of the numbers on blocks."""


def find_theme(name: str) -> Theme:
    """Return a theme by its name. Raises: ConfigError, for another name."""
    if name not in THEMES:
        raise ConfigError(f"{name!r}; known: {', '.join(THEMES)}.{nearest(name, THEMES)}", key="theme")
    return THEMES[name]


def variables_of(theme: Theme) -> dict[str, str]:
    """Return the colours of a theme by the names of their variables."""
    return {"accent": theme.ranks[1]} | {name: getattr(theme, name) for name in VARIABLES}


def style_of_themes() -> list[str]:
    """Return rules with the colours as variables: light, dark where the browser wants it, or the page's own."""
    rules = {
        name: f"color-scheme: {name}; " + " ".join(f"--{key}: {colour};" for key, colour in variables_of(theme).items())
        for name, theme in THEMES.items()
    }
    return [
        f":root {{ {rules['light']} }}",
        f"@media (prefers-color-scheme: dark) {{ :root {{ {rules['dark']} }} }}",
        *(f':root[data-theme="{name}"] {{ {rule} }}' for name, rule in rules.items()),
    ]


def block_colours(num_shades: int) -> dict[Kind, tuple[str, ...]]:
    """Return, per kind, one colour for each stage of a rank; the usual one where a rank holds a single stage."""
    places = [0.5] if num_shades == 1 else [shade / (num_shades - 1) for shade in range(num_shades)]
    return {kind: tuple(to_hex(blend(OPERATIONS[Op(kind)].colors, place)) for place in places) for kind in Kind}


def legend_name(kind: Kind) -> str:
    """Return what a legend calls a kind: `F forward`."""
    return f"{kind.letter} {OPERATIONS[Op(kind)].label}"


def ink_on(colour: str) -> str:
    """Return the ink with more contrast on this colour."""
    luminance = _luminance(to_rgb(colour))
    # Contrast as in WCAG 2: the brighter over the darker, both raised by 0.05.
    on_dark = 1.05 / (luminance + 0.05)
    on_light = (luminance + 0.05) / (_luminance(to_rgb(DARK_INK)) + 0.05)
    return LIGHT_INK if on_dark > on_light else DARK_INK


def blend(stops: Sequence[str], place: float) -> Rgb:
    """Return the colour at a place from 0, the first stop, to 1, the last one."""
    colours = np.array([to_rgb(stop) for stop in stops])
    at = place * (len(stops) - 1)
    return tuple(float(np.interp(at, range(len(stops)), colours[:, channel])) for channel in range(3))


def paler(colour: str, background: str, paleness: float) -> str:
    """Mix a colour with what is behind it: 0 leaves it, 1 hides it."""
    return to_hex(blend((colour, background), paleness))


def to_rgb(colour: str) -> Rgb:
    """Read `#RRGGBB`."""
    return tuple(int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))


def to_hex(colour: Rgb) -> str:
    """Write `#RRGGBB`."""
    return "#" + "".join(f"{round(255 * channel):02X}" for channel in colour)


def _luminance(colour: Rgb) -> float:
    linear = [channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4 for channel in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
