"""What the pages share: templates, scripts, and the themes as variables of a style sheet."""

import re
from collections.abc import Sequence
from importlib.resources import files

from penstock.show.palette import THEMES, Theme

VIEWER = files("penstock.show") / "viewer"
MODULE_SYNTAX = re.compile(r"^(import .*\n|/\*\* @import .*\n|export )", re.MULTILINE)
VARIABLES = ("background", "ink", "faint", "bubble", "line")


def read(name: str) -> str:
    """Return a file of the viewer."""
    return (VIEWER / name).read_text(encoding="utf-8").rstrip()


def fill(template: str, **texts: str) -> str:
    """Put texts in the places of their names, in one pass: what a text holds is not looked at again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda place: texts[place[1]], read(template)) + "\n"


def bundle(modules: Sequence[str]) -> str:
    """Return modules of the viewer as one, for a page that has no server to import them from.

    All that is done is to take out lines of imports, also of types, and the word `export` at the beginning of a line.
    So modules come after those that they import from; an import is one line and renames nothing; and no two modules
    have a name in common.
    """
    return "\n".join(MODULE_SYNTAX.sub("", read(module)) for module in modules)


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
