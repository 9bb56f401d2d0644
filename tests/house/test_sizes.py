"""Files, functions and nesting stay small, and each file says what it is for."""

import ast

import pytest

from tests.house.source import functions, modules, nesting, num_lines, parse

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_NESTING = 3


def first_function(text):
    return functions(parse(text, "penstock.example"))[0]


def test_files_have_at_most_400_lines():
    sizes = {module.name: len(module.text.splitlines()) for module in modules()}
    assert {name: size for name, size in sizes.items() if size > MAX_FILE_LINES} == {}


def test_functions_have_at_most_60_lines_without_their_docstring():
    sizes = {f"{m.at(node)} {node.name}": num_lines(node) for m in modules() for node in functions(m)}
    assert {place: size for place, size in sizes.items() if size > MAX_FUNCTION_LINES} == {}


def test_blocks_nest_at_most_3_deep():
    depths = {f"{m.at(node)} {node.name}": nesting(node) for m in modules() for node in functions(m)}
    assert {place: depth for place, depth in depths.items() if depth > MAX_NESTING} == {}


def test_every_file_opens_with_a_sentence():
    openings = {module.name: (ast.get_docstring(module.tree) or "").split("\n\n")[0] for module in modules()}
    assert [name for name, opening in openings.items() if not opening.strip().endswith((".", ":"))] == []


def test_the_docstring_and_decorators_of_a_function_are_not_counted():
    function = first_function('@cache\ndef f(\n    x,\n):\n    """One\n\n    two.\n    """\n    return x\n')

    assert num_lines(function) == 4


@pytest.mark.parametrize(
    ("body", "depth"),
    [
        ("    return 1", 0),
        ("    if a:\n        b()\n    elif c:\n        d()\n    elif e:\n        f()", 1),
        ("    if a:\n        b()\n    else:\n        if c:\n            d()", 2),
        ("    for a in b:\n        with c:\n            try:\n                d()\n            except e: f()", 3),
        ("    while a:\n        match b:\n            case 1:\n                if c:\n                    d()", 3),
        ("    if a:\n        def g():\n            for b in c:\n                d()", 1),
    ],
)
def test_nesting_counts_blocks(body, depth):
    assert nesting(first_function(f"def f():\n{body}\n")) == depth
