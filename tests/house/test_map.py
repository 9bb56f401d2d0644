"""What the map of execute/ says stands in its files too, and files with threads say what they guarantee."""

import ast
import re

import pytest

from tests.house.source import imports, map_of_execute, modules, parse

PACKAGE = "penstock.execute"
NUMBER_LINES = 3
"""The number of a file stands in so many lines of its docstring."""
NUMBER = re.compile(r"\(part (\d) of a step\)")
SHARING = {"threading", "mmap", "socket", "queue"}
"""Packages of files whose threads or processes share something."""
CLAIMS = ("Guarantees:", "Relies on:")


def text_of(module):
    return ast.get_docstring(module.tree) or ""


def wrong_numbers(lines, numbers):
    """Compare the numbered lines of a map with the numbers that files say, by their path within execute/."""
    expected = {path: number for number, line in lines for path in re.findall(r"[\w/]+\.py", line)}
    return [
        f"{path}: the map says {expected.get(path)}, the file says {numbers.get(path)}"
        for path in sorted({*expected, *numbers})
        if expected.get(path) != numbers.get(path)
    ]


def numbers_of_files():
    found = {}
    for module in modules():
        if module.name.startswith(f"{PACKAGE}."):
            opening = " ".join(text_of(module).splitlines()[:NUMBER_LINES])
            path = module.name.removeprefix(f"{PACKAGE}.").replace(".", "/") + ".py"
            if numbers := NUMBER.findall(opening):
                found[path] = "".join(numbers)
    return found


def without_claims(module):
    used = {item.target.split(".")[0] for item in imports(module)} & SHARING
    missing = [claim for claim in CLAIMS if claim not in text_of(module)]
    is_asked = module.name.startswith(PACKAGE) and used
    return [f"{module.name} imports {', '.join(sorted(used))}: say {missing}"] if is_asked and missing else []


def test_the_files_say_the_numbers_that_the_map_gives_them():
    lines, _ = map_of_execute()

    assert [number for number, _ in lines] == list("123456")
    assert all(re.search(r"\w\.py", line) for _, line in lines)
    assert wrong_numbers(lines, numbers_of_files()) == []


@pytest.mark.parametrize(
    "numbers", [{"a.py": "1"}, {"a.py": "1", "b/c.py": "1"}, {"a.py": "1", "b/c.py": "2", "d.py": "3"}]
)
def test_a_number_that_a_file_lacks_or_has_besides_is_found(numbers):
    assert len(wrong_numbers([("1", "begin  a.py  begins"), ("2", "admit  b/c.py  admits")], numbers)) == 1


def test_files_with_threads_or_shared_memory_say_what_they_guarantee_and_rely_on():
    assert [line for module in modules() for line in without_claims(module)] == []


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("import mmap", True),
        ('"""Guarantees: this. Relies on: that."""\nimport mmap', False),
        ('"""Guarantees: this."""\nfrom threading import Lock', True),
        ('"""This."""\nimport time', False),
    ],
)
def test_a_file_without_its_guarantees_is_found(text, is_found):
    assert bool(without_claims(parse(text, "penstock.execute.control.example"))) == is_found
