"""`OutsideState`: variables outside of modules that a forward uses around its points: of files, classes, functions.

    global calls          Model.table[n] = ...          def forward(self, x, seen=[])          nonlocal calls

Every stage runs the forward in its own number and order, and all threads share such variables.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from penstock.errors import PenstockError
from penstock.models.cutting.reached_code import ReachedCode, cell_value, is_foreign
from penstock.models.cutting.state import ATOMS, fingerprint

CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, nn.Module)
"""What is not looked into."""
UNLOOKED_PACKAGES = {"_thread", "threading", "_contextvars", "contextvars", "logging", "functools"}
"""Packages of objects that belong to a thread, or that say nothing of what is computed."""


class OutsideState:
    """Reads the variables outside of modules that some functions use."""

    def __init__(self, code: ReachedCode) -> None:
        """`code` are the functions."""
        self._code = code
        self._variables: dict[str, tuple[Mapping[str, Any], str]] = {}
        """Where a variable is, and its name there, by its name in messages."""
        self._cells: dict[str, CellType] = {}
        """The variables of outer functions, by name in messages."""
        self._defaults: dict[str, FunctionType] = {}
        """Functions that have arguments with defaults which may be changed in place, by name in messages."""
        for function in code.functions:
            self._add_variables(function)
            self._add_attributes(f"the attribute {function.__qualname__}.", vars(function))
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                if is_data(cell_value(cell)):
                    self._cells[f"the variable {name!r} around {function.__qualname__}()"] = cell
            if any(map(_may_change, (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()))):
                self._defaults[f"a default argument of {function.__qualname__}()"] = function
        for owner in code.classes:
            self._add_attributes(f"the class variable {owner.__qualname__}.", owner.__dict__)

    def state(self) -> dict[str, Any]:
        """Return the fingerprint of each variable that holds data, by its name in messages."""
        values = [(text, variables.get(name)) for text, (variables, name) in self._variables.items()]
        values += [(text, cell_value(cell)) for text, cell in self._cells.items()]
        values += [(text, (item.__defaults__, item.__kwdefaults__)) for text, item in self._defaults.items()]
        return {text: fingerprint(value, levels=2) for text, value in values if value is not None and is_data(value)}

    def _add_variables(self, function: FunctionType) -> None:
        """Add the variables of the function's file that it uses, and what it uses of other files and functions."""
        variables = function.__globals__
        for name in self._code.names_of(function):
            value = variables.get(name)
            if isinstance(value, ModuleType) and not is_foreign(value.__name__):
                self._add_attributes(f"the global variable {value.__name__}.", vars(value))
            elif isinstance(value, FunctionType):
                self._add_attributes(f"the attribute {value.__qualname__}.", vars(value))
            elif name in self._code.stored_names or _may_change(value):
                self._variables[f"the global variable {function.__module__}.{name}"] = variables, name

    def _add_attributes(self, prefix: str, attributes: Mapping[str, Any]) -> None:
        """Add what functions set of a class, function or file, or what may be changed there in place."""
        for name in self._code.names:
            if not name.startswith("__") and (name in self._code.stored_names or _may_change(attributes.get(name))):
                self._variables[prefix + name] = attributes, name


def is_data(value: Any) -> bool:
    """Return whether a variable holds something by which a forward may compute."""
    kind = type(value)
    return not (isinstance(value, CODE) or hasattr(kind, "__get__") or kind.__module__ in UNLOOKED_PACKAGES)


def _may_change(value: Any) -> bool:
    """Whether a value is data that may be changed in place."""
    return is_data(value) and not isinstance(value, ATOMS)


def refuse_exact_types(code: ReachedCode) -> None:
    """Refuse functions that ask `type(block) is Block`, since a stand-in is of a subclass.

    Raises:
        PenstockError: it names the function and what it asks.
    """
    for function in code.functions:
        if "type" not in code.names_of(function):
            continue
        for comparison in _comparisons(function):
            sides = [comparison.left, *comparison.comparators]
            others = [side for side in sides if not _is_type_call(side)]
            asks = any(isinstance(operator, ast.Is | ast.IsNot) for operator in comparison.ops)
            if asks and 0 < len(others) < len(sides) and any(_may_be_module(side, function) for side in others):
                raise PenstockError(
                    f"{function.__qualname__}() asks {ast.unparse(comparison)!r} around the points, where stand-ins "
                    "have the places of submodules: their type is another one. Ask isinstance(), or compare by =="
                )


def _comparisons(function: FunctionType) -> Iterator[ast.Compare]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # code of a shell has no file
        return
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.Compare))


def _is_type_call(side: ast.expr) -> bool:
    return isinstance(side, ast.Call) and ast.unparse(side.func) == "type" and len(side.args) == 1


def _may_be_module(side: ast.expr, function: FunctionType) -> bool:
    """Whether an expression may be a class of modules; it is taken for one where it is no name of a file."""
    if isinstance(side, ast.Constant):
        return False
    names = ast.unparse(side).split(".")
    builtins = function.__globals__.get("__builtins__", {})
    known = {**(builtins if isinstance(builtins, dict) else vars(builtins)), **function.__globals__}
    value = known.get(names[0])
    for name in names[1:]:
        value = getattr(value, name, None)
    return value is None or (isinstance(value, type) and issubclass(value, nn.Module))
