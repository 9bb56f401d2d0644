"""The generated pages of docs/reference are what the code says now, and have every public name once."""

import importlib.util

import penstock as ps
from tests.house.source import ROOT

SPEC = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
reference = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(reference)


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


def test_a_signature_that_is_long_has_a_line_for_each_parameter():
    def short(first: int, *, second: str = "x") -> None: ...

    def long(
        first_of_several: tuple[int, ...], second_of_several: int = 1, *, third_of_several: float = 0.5
    ) -> int: ...

    assert reference.signature("short", short) == 'short(first: int, *, second: str = "x")'
    assert reference.signature("long", long).splitlines() == [
        "long(",
        "    first_of_several: tuple[int, ...],",
        "    second_of_several: int = 1,",
        "    *,",
        "    third_of_several: float = 0.5,",
        ") -> int",
    ]


def test_the_errors_of_a_docstring_are_a_list():
    def fails():
        """Fail.

        Raises:
            ValueError, KeyError: always, and
                at once.
            OSError: never.
        """

    assert (
        reference.docstring(fails)
        == "Fail.\n\nRaises:\n\n* `ValueError, KeyError`: always, and at once.\n* `OSError`: never."
    )


def test_methods_that_steps_call_are_left_out_and_exist():
    for name, methods in reference.CALLED_BY_STEPS.items():
        owner = getattr(ps, name)

        assert {method for method in methods if not hasattr(owner, method)} == set()
        assert not methods & {shown for shown, _ in reference.members(owner)}
    assert "### begin_skips" not in reference.pages()["api/pipeline_and_layers.md"]
