"""Files, functions and nesting stay small, and each file says what it is for."""

import ast

import pytest

from tests.house.source import classes, functions, modules, nesting, num_lines, num_methods, parse

MAX_FILE_LINES = 400
MAX_LINES_IN_EXECUTE = 350
MAX_FUNCTION_LINES = 60
MAX_NESTING = 3
MAX_METHODS = 14
LARGE = {"Table", "Schedule", "Program", "Timeline", "Pipeline"}
"""What users hold: their many properties and methods each say one thing of a table, or of a pipeline."""


def first_function(text):
    return functions(parse(text, "penstock.example"))[0]


def too_long(sizes):
    """Find the files that have more lines than their folder may have."""
    limits = {name: MAX_LINES_IN_EXECUTE if name.startswith("penstock.execute") else MAX_FILE_LINES for name in sizes}
    return {name: size for name, size in sizes.items() if size > limits[name]}


def test_files_have_at_most_400_lines_and_those_of_execute_350():
    assert too_long({module.name: len(module.text.splitlines()) for module in modules()}) == {}


def test_a_file_that_is_too_long_is_found():
    assert list(too_long({"penstock.ir.a": 400, "penstock.ir.b": 401})) == ["penstock.ir.b"]
    assert list(too_long({"penstock.execute.a": 350, "penstock.execute.b": 351})) == ["penstock.execute.b"]


def test_functions_have_at_most_60_lines_without_their_docstring():
    sizes = {f"{m.at(node)} {node.name}": num_lines(node) for m in modules() for node in functions(m)}
    assert {place: size for place, size in sizes.items() if size > MAX_FUNCTION_LINES} == {}


def test_blocks_nest_at_most_3_deep():
    depths = {f"{m.at(node)} {node.name}": nesting(node) for m in modules() for node in functions(m)}
    assert {place: depth for place, depth in depths.items() if depth > MAX_NESTING} == {}


def test_classes_have_at_most_14_methods():
    """Properties and special methods count. A class with more does two things."""
    sizes = {f"{m.at(node)} {node.name}": num_methods(node) for m in modules() for node in classes(m)}
    too_large = {place: size for place, size in sizes.items() if size > MAX_METHODS}

    assert {place: size for place, size in too_large.items() if place.split()[-1] not in LARGE} == {}
    assert not any("penstock/execute" in place for place in too_large)


def test_every_file_opens_with_a_sentence():
    openings = {module.name: (ast.get_docstring(module.tree) or "").split("\n\n")[0] for module in modules()}
    assert [name for name, opening in openings.items() if not opening.strip().endswith((".", ":"))] == []


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


def test_lines_are_counted_without_docstring_and_decorators_and_methods_without_nested_classes():
    function = '@cache\ndef f(\n    x,\n):\n    """One\n\n    two.\n    """\n    return x\n'
    nested = (
        "class A:\n    @property\n    def b(self): 0\n    def __len__(self): 0\n    class C:\n        def d(self): 0\n"
    )

    assert num_lines(first_function(function)) == 4
    assert [num_methods(node) for node in classes(parse(nested, "penstock.example"))] == [2, 1]
