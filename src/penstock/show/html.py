"""What the pages share: templates, and the themes as variables of a style sheet."""

import re
from importlib.resources import files

from penstock.show.palette import THEMES

VIEWER = files("penstock.show") / "viewer"
VARIABLES = ("background", "ink", "faint", "bubble", "line")


def read(name: str) -> str:
    """Return a file of the viewer."""
    return (VIEWER / name).read_text(encoding="utf-8").rstrip()


def fill(template: str, **texts: str) -> str:
    """Put texts in the places of their names, in one pass: what a text holds is not looked at again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda place: texts[place[1]], read(template)) + "\n"


def style_of_themes() -> list[str]:
    """Return rules with the colours as variables: light, dark where the browser wants it, or as the page is told."""
    rules = {
        name: f"color-scheme: {name}; --accent: {theme.ranks[1]}; "
        + " ".join(f"--{key}: {getattr(theme, key)};" for key in VARIABLES)
        for name, theme in THEMES.items()
    }
    return [
        f":root {{ {rules['light']} }}",
        f"@media (prefers-color-scheme: dark) {{ :root {{ {rules['dark']} }} }}",
        *(f':root[data-theme="{name}"] {{ {rule} }}' for name, rule in rules.items()),
    ]
