"""Sphinx builds the site from the Markdown of this folder: `make docs` writes build/docs/index.html."""

import re
import shutil
from functools import partial
from pathlib import Path

from sphinx.application import Sphinx

from penstock.version import VERSION

project = "Penstock"
author = "the authors of Penstock"
version = release = VERSION
extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["_static"]
nitpicky = True

myst_heading_anchors = 4  # the anchors that GitHub makes of headings: page.md#a-heading
highlight_language = "text"
copybutton_prompt_text = "$ "  # of a console's block, what was typed is copied and what was printed is not
copybutton_exclude = ".linenos, .gp"

html_theme = "furo"
html_title = f"Penstock {VERSION}"
html_static_path = ["_static"]
html_css_files = ["penstock.css"]
html_logo = "_static/mark.svg"
html_favicon = "_static/mark.svg"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0B5C8A", "color-brand-content": "#0B69A3"},
    "dark_css_variables": {"color-brand-primary": "#7CC4F5", "color-brand-content": "#7CC4F5"},
}
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False

# The sections of the site, in their order, and the pages of each. A page that is in none of them fails the build.
SECTIONS = {
    "Start": ["start", "all"],
    "Tasks": ["tasks", "cookbook"],
    "Guides": [
        "models",
        "families",
        "pipeline",
        "training",
        "training/*",
        "observing",
        "pictures",
        "planning",
        "searching",
        "simulator",
    ],
    "Recipes": ["recipes/*"],
    "Tutorials": ["tutorials/*"],
    "Schedules": ["schedules", "schedules/*"],
    "Moving from": ["moving/README", "moving/*"],
    "Reference": ["reference/api/README", "reference/api/*", "reference/*"],
    "Explanations": ["design", "explanations/*", "words"],
    "Measured": ["performance", "parity"],
}


def link_other_files(app: Sphinx, docname: str, source: list[str]) -> None:
    """Make links to Markdown outside this folder, such as ../README.md, links to the files themselves."""
    source[0] = re.sub(r"\]\(((?:\.\./)+[^)#]*\.md)", partial(_as_file, app, docname), source[0])


def _as_file(app: Sphinx, docname: str, link: re.Match[str]) -> str:
    target = (Path(app.srcdir) / docname).parent.joinpath(link[1]).resolve()
    return link[0] if target.is_relative_to(Path(app.srcdir)) else f"](path:{link[1]}"


def name_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    """Call links by the titles of their pages; a repository shows the names of files."""
    source[0] = re.sub(r"\[[\w/]+\.md\](?=\((?!\.\./\.\.)[\w./]+\.md\))", "[]", source[0])


def show_pictures(app: Sphinx, docname: str, source: list[str]) -> None:
    """Let pictures follow the theme that is chosen on the page; a repository's viewer follows that of the browser."""
    source[0] = re.sub(
        r'<picture>\s*<source [^>]*srcset="([^"]+)">\s*<img alt="([^"]*)" src="([^"]+)">\s*</picture>',
        r'<p><img class="only-light" alt="\2" src="\3"><img class="only-dark" alt="\2" src="\1"></p>',
        source[0],
    )


def copy_pictures(app: Sphinx, error: Exception | None) -> None:
    """Copy the pictures, which Sphinx does not see in HTML."""
    pictures = Path(app.srcdir) / "pictures"
    if error is None and pictures.exists():
        shutil.copytree(pictures, Path(app.outdir) / "pictures", dirs_exist_ok=True)


def add_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append the tables of contents to the first page, whose Markdown stays plain; a pattern may match no page yet."""
    if docname != "index":
        return
    app.env.note_reread()  # a new page changes the contents, and not the first page's file
    for section, patterns in SECTIONS.items():
        pages = [page for pattern in patterns for page in matching(Path(app.srcdir), pattern)]
        entries = "\n".join(dict.fromkeys(pages))
        if entries:
            source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {section}\n\n{entries}\n```\n"


def matching(folder: Path, pattern: str) -> list[str]:
    """Return the names of the pages that match a pattern, in alphabetical order."""
    return sorted(re.sub(r"\.md$", "", str(path.relative_to(folder))) for path in folder.glob(f"{pattern}.md"))


def setup(app: Sphinx) -> None:
    app.connect("source-read", link_other_files)
    app.connect("source-read", name_pages)
    app.connect("source-read", show_pictures)
    app.connect("source-read", add_contents)
    app.connect("build-finished", copy_pictures)
