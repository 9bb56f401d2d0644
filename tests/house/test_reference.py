"""The generated pages of docs/reference are what the code says now, and have every public name once."""

import penstock as ps
from tests.house.source import script

reference = script("reference")


def test_the_pages_are_what_the_code_says_now():
    stale = [
        name
        for name, text in reference.pages().items()
        if not (reference.FOLDER / name).exists() or (reference.FOLDER / name).read_text(encoding="utf-8") != text
    ]

    assert stale == [], "run: python scripts/reference.py"


def test_every_public_name_is_in_one_group():
    grouped = [name for _, names in reference.GROUPS.values() for name in names]

    assert sorted([*grouped, *reference.ERRORS, "__version__"]) == sorted(ps.__all__)


def test_methods_that_steps_call_are_left_out_and_exist():
    for name, methods in reference.CALLED_BY_STEPS.items():
        owner = getattr(ps, name)

        assert {method for method in methods if not hasattr(owner, method)} == set()
        assert not methods & {shown for shown, _ in reference.members(owner)}
    assert "### begin_skips" not in reference.pages()["api/pipeline_and_layers.md"]
