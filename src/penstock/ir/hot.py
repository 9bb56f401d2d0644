"""Loops over columns that run as plain Python when the table is small and compiled by numba when it is large.

A small plan must not wait for a compiler, a large one must not wait for the interpreter: the same function serves both.
Such a function only indexes arrays and calls its `helpers`, which stand in the same file and are named callers first.
"""

from collections.abc import Callable
from functools import cached_property
from types import FunctionType
from typing import Any

import numpy as np

COMPILE_ABOVE_ROWS = 60_000


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
        import numba

        jit = numba.njit(cache=True)
        names: dict[str, Any] = {}
        for function in (*reversed(self._helpers), self._function):
            names[function.__name__] = jit(_with_globals(function, names))
        compiled: Callable[..., Any] = names[self._function.__name__]
        return compiled


def _with_globals(function: Callable[..., Any], names: dict[str, Any]) -> FunctionType:
    """Copy a function so that it sees compiled helpers under the names by which the original calls them."""
    assert isinstance(function, FunctionType)
    copy = FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__)
    copy.__qualname__ = function.__qualname__
    copy.__module__ = function.__module__
    return copy


def _view(column: Any) -> Any:
    return column.data if isinstance(column, np.ndarray) else column
