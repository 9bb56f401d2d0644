#!/usr/bin/env python
"""Write the counts and the last column of docs/parity.md: in which files tests show each feature.

Usage: scripts/parity.py     A house test compares the page with what the tests say now.

A test names the features that it shows: `@pytest.mark.feature("A1", "B3")`. The other columns are written by hand.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "parity.md"
ROW = re.compile(r"^(?P<written>\| (?P<feature>[A-HX]\d+|0\.\d+) \|.*\|)[^|]*\|$", re.MULTILINE)
"""A row: all columns but the last one are written by hand."""
COUNTS = re.compile(r"^\*\*\d+ rows: .*\*\*", re.MULTILINE)
STATES = ("done", "partly", "not yet")


def shown_in(source: str) -> Iterator[tuple[str, str]]:
    """Find each feature that a test of a file shows, with the test's name."""
    for test in ast.parse(source).body:
        if isinstance(test, ast.FunctionDef) and test.name.startswith("test_"):
            for mark in test.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.feature":
                    yield from ((ast.literal_eval(feature), test.name) for feature in mark.args)


def tests_of_features() -> dict[str, list[str]]:
    """Return links to the files whose tests show each feature, in their order."""
    links: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        link = f"[{path.stem.removeprefix('test_')}](../{path.relative_to(ROOT).as_posix()})"
        for feature in dict.fromkeys(feature for feature, _ in shown_in(path.read_text(encoding="utf-8"))):
            links.setdefault(feature, []).append(link)
    return links


def page(text: str, tests: dict[str, list[str]]) -> str:
    """Return the page with the tests of every row, and the number of rows in each state."""

    def with_tests(row: re.Match[str]) -> str:
        return f"{row['written']} {', '.join(tests.get(row['feature'], []))} |".replace("|  |", "| |")

    states = [row["written"].split("|")[-2].strip() for row in ROW.finditer(text)]
    counts = ", ".join(f"{states.count(state)} {state}" for state in STATES)
    return COUNTS.sub(f"**{len(states)} rows: {counts}.**", ROW.sub(with_tests, text))


def main() -> None:
    """Write the page anew."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), tests_of_features()), encoding="utf-8")


if __name__ == "__main__":
    main()
