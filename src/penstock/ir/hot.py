"""Loops over columns that run as plain Python when the table is small and compiled by numba when it is large.

A small plan must not wait for a compiler, a large one must not wait for the interpreter: the same function serves both.
Such a function only indexes arrays and calls its `helpers`, which stand in the same file and are named callers first.
Arrays that go together may come as a NamedTuple. What is compiled is kept on disk beside the source (or where
NUMBA_CACHE_DIR says): the next process only loads it. Constants of its module are part of it: who changes the numbers
of operations must touch the files whose loops know them.

Where rows do not depend on each other, numpy on one block of rows after the other serves both as well: see `blocks`.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from types import FunctionType
from typing import Any

import numpy as np
from numpy.typing import NDArray

COMPILE_ABOVE_ROWS = 60_000
BLOCK_ROWS = 1 << 16
"""Intermediate columns of so many rows stay in a processor's cache, and never add up to the size of a table."""


def blocks(num_rows: int) -> Iterator[slice]:
    """Cut rows into blocks, in order."""
    for begin in range(0, num_rows, BLOCK_ROWS):
        yield slice(begin, min(begin + BLOCK_ROWS, num_rows))


class Hot:
    """A function over columns, compiled on first use with a large table."""

    def __init__(self, function: Callable[..., Any], *helpers: Callable[..., Any]) -> None:
        self._function = function
        self._helpers = helpers

    def __call__(self, num_rows: int, *columns: Any) -> Any:
        """Run over columns of `num_rows` rows; arrays are changed in place."""
        if num_rows > COMPILE_ABOVE_ROWS:
            return self.compiled(*columns)
        return self.interpreted(*columns)

    def interpreted(self, *columns: Any) -> Any:
        """Run without compiling; memory views index faster than arrays there."""
        return self._function(*(_view(column) for column in columns))

    @cached_property
    def compiled(self) -> Callable[..., Any]:
        names: dict[str, Any] = {}
        for function in (*reversed(self._helpers), self._function):
            names[function.__name__] = _compile(_with_globals(function, names))
        compiled: Callable[..., Any] = names[self._function.__name__]
        return compiled


def frozen(column: NDArray[Any]) -> NDArray[Any]:
    """Return a view that cannot be written: a loop is compiled anew for each mix of columns that can and cannot."""
    view = column.view()
    view.flags.writeable = False
    return view


def _compile(function: FunctionType) -> Any:
    import numba

    try:
        return numba.njit(cache=True)(function)
    except RuntimeError:  # there is no folder that a compiled function could be kept in
        return numba.njit(function)


def _with_globals(function: Callable[..., Any], names: dict[str, Any]) -> FunctionType:
    """Copy a function so that it sees compiled helpers under the names by which the original calls them."""
    assert isinstance(function, FunctionType)
    copy = FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__)
    copy.__qualname__ = function.__qualname__
    copy.__module__ = function.__module__
    return copy


def _view(column: Any) -> Any:
    if isinstance(column, tuple):
        return type(column)(*map(_view, column))
    return column.data if isinstance(column, np.ndarray) else column
