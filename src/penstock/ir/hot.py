"""Loops over columns that run as plain Python when the table is small and compiled by numba when it is large.

A small plan must not wait for a compiler, a large one must not wait for the interpreter: the same function serves both.
Such a function only indexes arrays, reads numbers, tuples and arrays of its module, and calls its `helpers`, which are
named callers first. Arrays that go together may come as a NamedTuple.

numba keeps machine code on disk for the next process. It compares the source file and the types of the columns, but
not the constants that the code was compiled with, nor helpers in other files. So a digest of all of these is part of
the name under which the code is kept: changed ones are compiled under a new name.

Where rows do not depend on each other, numpy on one block of rows after the other serves both as well: see `blocks`.
"""

import dis
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import EnumType
from hashlib import sha256
from types import FunctionType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Bools = NDArray[np.bool_]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
"""Columns, by the type of what they hold."""

COMPILE_ABOVE_ROWS = 60_000
BLOCK_ROWS = 1 << 16
"""Intermediate columns of so many rows stay in a processor's cache, and never add up to the size of a table."""
LOG = logging.getLogger(__name__)
"""Each compilation is two records at INFO: before it, and after it with its duration as `compiled_s`."""


def blocks(num_rows: int) -> Iterator[slice]:
    """Cut rows into blocks, in order."""
    for begin in range(0, num_rows, BLOCK_ROWS):
        yield slice(begin, min(begin + BLOCK_ROWS, num_rows))


def is_large(num_rows: int) -> bool:
    """Return whether a table has so many rows that compiled loops pay off."""
    return num_rows > COMPILE_ABOVE_ROWS


class Hot:
    """A function over columns, compiled on first use with a large table, anew for each combination of their types."""

    def __init__(self, function: Callable[..., Any], *helpers: Callable[..., Any], inlines: bool = False) -> None:
        """Take a function and its helpers, which become parts of it if it `inlines` them: for short, frequent calls."""
        self._functions, self._inlines = (function, *helpers), inlines
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._compiled_of_forms: dict[Any, Callable[..., Any]] = {}

    def __call__(self, num_rows: int, *columns: Any) -> Any:
        """Run over columns of `num_rows` rows; arrays are changed in place."""
        if is_large(num_rows):
            return self.compiled(*columns)
        return self.interpreted(*columns)

    def interpreted(self, *columns: Any) -> Any:
        """Run without compiling; memory views index faster than arrays there."""
        return self._functions[0](*(_view(column) for column in columns))

    def compiled(self, *columns: Any) -> Any:
        """Run compiled."""
        form = tuple(map(_form, columns))  # found in a tenth of the time in which numba finds types
        if form not in self._compiled_of_forms:
            self._compiled_of_forms[form] = self._compiled_for(columns)
        return self._compiled_of_forms[form](*columns)

    def _compiled_for(self, columns: Sequence[Any]) -> Callable[..., Any]:
        """Return the compiled function for columns of these types."""
        import numba

        types = tuple(map(numba.typeof, columns))
        if types not in self._compiled:
            start = time.perf_counter()
            LOG.info("compiling %s", self._functions[0].__qualname__)
            self._compiled[types] = _compile(self._functions, types, inlines=self._inlines)
            compiled_s = time.perf_counter() - start
            LOG.info("compiled in %.2f s", compiled_s, extra={"compiled_s": compiled_s})
        return self._compiled[types]


def frozen(column: Array) -> Array:
    """Return a view that cannot be written: a loop is compiled anew for each mix of columns that can and cannot."""
    view = column.view()
    view.flags.writeable = False
    return view


def _form(column: Any) -> Any:
    """Return what decides on numba's type of a column, or of a tuple of columns."""
    if isinstance(column, np.ndarray):
        return column.dtype, column.ndim, column.flags.num
    return (type(column), *map(_form, column)) if isinstance(column, tuple) else type(column)


def _compile(functions: Sequence[Callable[..., Any]], types: tuple[Any, ...], *, inlines: bool) -> Callable[..., Any]:
    """Load the machine code of the first function for columns of these types, or make it; the others are helpers."""
    import numba

    digest = _digest(functions, types, f"{numba.__version__} {inlines}")
    names: dict[str, Any] = {}
    for helper in reversed(functions[1:]):
        options: dict[str, Any] = {"inline": "always"} if inlines else {}
        names[helper.__name__] = numba.njit(_with_globals(helper, names), **options)
    loop = _with_globals(functions[0], names)
    # Loading code that was damaged or written by half may fail with any error: the second name has files of its own.
    # Both fail where no folder can be written.
    for name in (f"{loop.__name__}_{digest}", f"{loop.__name__}_{digest}_again"):
        loop.__qualname__ = name
        with suppress(Exception):
            compiled: Callable[..., Any] = numba.njit([types], cache=True)(loop)
            return compiled
    compiled_here: Callable[..., Any] = numba.njit([types])(loop)
    return compiled_here


def _with_globals(function: Callable[..., Any], names: dict[str, Any]) -> FunctionType:
    """Copy a function so that it sees compiled helpers under the names by which the original calls them."""
    assert isinstance(function, FunctionType)
    copy = FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__)
    copy.__module__ = function.__module__
    return copy


def _digest(functions: Sequence[Callable[..., Any]], types: Sequence[Any], compiler: str) -> str:
    """Return a digest of everything that machine code is made from."""
    content: list[Any] = [sys.version, np.__version__, compiler]
    content += [(str(column_type), getattr(column_type, "fields", ())) for column_type in types]
    helpers = {function.__name__ for function in functions}  # each is digested in its turn
    for function in functions:
        code = function.__code__
        names = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"} - helpers
        values = {name: function.__globals__[name] for name in sorted(names & function.__globals__.keys())}
        content += [function.__module__, function.__qualname__, code.co_code, code.co_names, code.co_varnames]
        content += [_content(value, function) for value in (code.co_consts, *values.items())]
    return sha256(repr(content).encode()).hexdigest()[:16]


def _content(value: Any, reader: Callable[..., Any]) -> Any:
    """Return the value in a form whose text holds all of it, and is the same in every process."""
    match value:
        case None | bool() | int() | float() | str() | np.generic():
            return value
        case np.ndarray():
            return value.dtype.str, value.shape, value.tobytes()
        case tuple():
            return [_content(entry, reader) for entry in value]
        case EnumType():
            return list(value)
    raise TypeError(
        f"{reader.__qualname__} reads {value!r}; a compiled loop may read numbers, tuples, arrays and its helpers. "
        "Name a function that it calls as a helper, and pass anything else as a column"
    )


def _view(column: Any) -> Any:
    if isinstance(column, tuple):
        return type(column)(*map(_view, column))
    return column.data if isinstance(column, np.ndarray) else column
