"""What is packaged: fragments of the changelog have a kind, and the file that they become has its place for them."""

import tomllib

from tests.house.source import ROOT

CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def fragments():
    return [path for path in (ROOT / "changelog.d").iterdir() if path.name not in ("README.md", "template.md.jinja")]


def test_every_fragment_of_the_changelog_names_its_kind():
    kinds = {kind["directory"] for kind in CONFIG["tool"]["towncrier"]["type"]}

    assert kinds == {"added", "changed", "fixed", "removed"}
    for path in fragments():
        _, *kind_and_suffix = path.name.split(".")
        assert kind_and_suffix in [[kind, "md"] for kind in kinds], path.name
        assert path.read_text(encoding="utf-8").strip(), path.name


def test_the_changelog_has_a_place_for_new_sections():
    marker = CONFIG["tool"]["towncrier"]["start_string"]

    assert (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").count(marker) == 1
