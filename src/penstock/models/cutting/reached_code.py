"""`ReachedCode`: the functions that the forward of a model may call around its points, found by their bytecode.

    Model.forward  ──►  self._mask  ──►  make_mask (a function of the file)  ──►  wrapped functions, closures

What such functions read and write outside of modules is followed by `OutsideState`. Functions of torch and of Python's
own library are left alone.
"""

import dis
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

FOREIGN_PACKAGES = sys.stdlib_module_names | {"torch", "numpy", "penstock"}
"""Packages whose functions are not looked into."""
STORES = {"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR"}
"""Instructions that set variables of files, and attributes."""


class ReachedCode:
    """Functions that may run around the points of a model, and the classes of what is there."""

    def __init__(self, modules: Iterable[nn.Module], hooks: Iterable[Callable[..., Any]] = ()) -> None:
        """`modules` are those around the points, and `hooks` what torch calls around their forwards."""
        self.functions: list[FunctionType] = []
        """The functions, each once, in the order in which they were found."""
        self.classes: list[type] = []
        """The classes of the modules and those that the functions name, with their base classes."""
        self.names: set[str] = set()
        """Names of the variables and attributes that the functions use."""
        self.stored_names: set[str] = set()
        """Names of the variables that the functions set, and of attributes of other objects than `self`."""
        self._known_ids: set[int] = set()
        modules = list(modules)
        waiting = [*map(type, modules), *(module.forward for module in modules), *hooks]
        while waiting:
            for value in waiting:
                self._add(value)
            # Other functions call a method by its name.
            methods = [function for owner in self.classes for function in self._called_methods(owner)]
            named = [value for function in self.functions for value in _values_of(function)]
            waiting = [value for value in (*methods, *named) if id(value) not in self._known_ids]

    @staticmethod
    def names_of(function: FunctionType) -> set[str]:
        """Return the names of files' variables and of attributes that a function uses."""
        return {name for code in codes_of(function) for name in code.co_names}

    def _add(self, value: Any) -> None:
        """Add a function, or a class with its base classes."""
        self._known_ids.add(id(value))
        if isinstance(value, type):
            self.classes += [base for base in value.__mro__ if not _is_foreign(base) and base not in self.classes]
        for function in _functions_of(value):
            if function not in self.functions and not _is_foreign(function):
                self.functions.append(function)
                self.names |= self.names_of(function)
                for code in codes_of(function):
                    self.stored_names.update(_stored_names(code))

    def _called_methods(self, owner: type) -> Iterator[FunctionType]:
        """Yield the methods of a class that the functions name, and those that Python calls by itself."""
        for name, value in vars(owner).items():
            if name in self.names or (name.startswith("__") and name != "__init__"):
                yield from _functions_of(value)


def _values_of(function: FunctionType) -> list[Any]:
    """Return the functions that a function names, and the classes of its own file that are no modules."""
    values: list[Any] = [function.__globals__.get(name) for name in ReachedCode.names_of(function)]
    values += [cell_value(cell) for cell in function.__closure__ or ()]
    return [value for value in values if isinstance(value, FunctionType | MethodType) or _is_helper(value, function)]


def _is_helper(value: Any, function: FunctionType) -> bool:
    """Whether a value is a class of the function's own file that is no module."""
    is_local = isinstance(value, type) and value.__module__ == function.__module__
    return is_local and not issubclass(value, nn.Module)


def _functions_of(value: Any) -> list[FunctionType]:
    """Return the functions behind a function, method, property or decorated function."""
    accessors = (value, *(getattr(value, name, None) for name in ("__func__", "fget", "fset", "__wrapped__")))
    return [item for item in accessors if isinstance(item, FunctionType)]


def codes_of(function: FunctionType) -> Iterator[CodeType]:
    """Yield the code of a function, and of the functions in it."""
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _stored_names(code: CodeType) -> Iterator[str]:
    """Yield the names of the variables and attributes that some code sets, without attributes of `self`."""
    instructions = list(dis.get_instructions(code))
    for index, item in enumerate(instructions):
        if item.opname in STORES and not (item.opname.endswith("ATTR") and _is_of_self(instructions[:index])):
            yield item.argval


def _is_of_self(instructions: Sequence[dis.Instruction]) -> bool:
    """Whether the instructions before one that sets an attribute end by loading `self` for it."""
    loading = instructions[-1]
    if loading.opname == "SWAP":  # as in self.calls += 1, which has loaded it before it has read the attribute
        copies = [index for index, item in enumerate(instructions) if item.opname == "COPY" and index]
        loading = instructions[copies[-1] - 1] if copies else loading
    name = loading.argval[-1] if isinstance(loading.argval, tuple) else loading.argval
    return loading.opname.startswith("LOAD_FAST") and name == "self"


def cell_value(cell: Any) -> Any:
    """Return what a variable of an outer function has; None before it has something."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _is_foreign(item: Any) -> bool:
    return item is object or is_foreign(item.__module__ or "")


def is_foreign(name: str) -> bool:
    """Return whether a file, by its full name in Python, is of torch or Python itself."""
    return name.partition(".")[0] in FOREIGN_PACKAGES
