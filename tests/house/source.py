"""The files of src/penstock, parsed, and the measures that the house tests apply to them."""

import ast
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "penstock"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)


@dataclass(frozen=True)
class Module:
    """One source file; `name` is dotted, a package's own file has the package's name."""

    path: Path
    name: str
    text: str
    tree: ast.Module

    def at(self, node):
        return f"{self.path.relative_to(ROOT)}:{node.lineno}"

    @property
    def room(self):
        """The folder or file directly in src/penstock that this file is or lies in."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else "__init__"

    @property
    def is_package(self):
        return self.path.stem == "__init__"


@dataclass(frozen=True)
class Import:
    """One imported dotted name, absolute, and whether the statement stands inside a function."""

    target: str
    node: ast.AST
    is_inside_function: bool


def parse(text, name, path=SOURCE / "example.py"):
    return Module(path, name, text, ast.parse(text))


@cache
def modules():
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = ["penstock", *path.relative_to(SOURCE).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(parse(path.read_text(encoding="utf-8"), name, path))
    assert found, f"no source files under {SOURCE}"
    return tuple(found)


def map_of_execute():
    """Return the numbered lines of the map in execute/__init__.py, and what follows on the order of the parts."""
    (found,) = (module for module in modules() if module.name == "penstock.execute")
    way, heading, order = ast.get_docstring(found.tree).partition("From below to above")
    assert heading, "the map in execute/__init__.py has lost its heading"
    return re.findall(r"^ *([1-9])  (.*)$", way, re.MULTILINE), order


def parts_of_map():
    """List the folders and files directly in execute/ as its map has them, from below to above."""
    return re.findall(r"(\w+)(?:/|\.py)", map_of_execute()[1])


@cache
def all_nodes(module):
    return tuple(ast.walk(module.tree))


def nodes(module, *kinds):
    return [node for node in all_nodes(module) if isinstance(node, kinds)]


def functions(module):
    return nodes(module, *FUNCTIONS)


def classes(module):
    return nodes(module, ast.ClassDef)


@cache
def imports(module):
    """List every import; `from a import b` counts as a.b."""
    inside = {id(node) for function in functions(module) for node in ast.walk(function)}
    found = []
    for node in nodes(module, ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node, id(node) in inside) for alias in node.names]
        else:
            base = _absolute(module, node)
            found += [Import(f"{base}.{alias.name}", node, id(node) in inside) for alias in node.names]
    return found


def _absolute(module, node):
    if not node.level:
        return node.module
    package = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *filter(None, [node.module])])


def num_lines(function):
    """Count the lines from `def` to the end, without the docstring."""
    total = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function, clean=False) is None:
        return total
    docstring = function.body[0]
    return total - (docstring.end_lineno - docstring.lineno + 1)


def num_methods(of_class):
    """Count methods, properties and special methods."""
    return sum(isinstance(node, FUNCTIONS) for node in of_class.body)


def nesting(function):
    """Return the depth of the deepest block; an elif is no deeper than its if, an inner function counts for itself."""
    return max((_depth(child, function) for child in function.body), default=0)


def _depth(node, parent):
    if isinstance(node, FUNCTIONS):
        return 0
    is_elif = isinstance(node, ast.If) and isinstance(parent, ast.If) and parent.orelse == [node]
    own = int(isinstance(node, BLOCKS) and not (is_elif and _starts_like_elif(node, parent)))
    return own + max((_depth(child, node) for child in ast.iter_child_nodes(node)), default=0)


def _starts_like_elif(node, parent):
    # `else:` followed by an indented `if` gives the same tree; only the column tells them apart.
    return node.col_offset == parent.col_offset


def script(name):
    """Return a script of `scripts/` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_none(found):
    assert not found, "\n" + "\n".join(found)
