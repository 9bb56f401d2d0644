"""Finds the function of a user that `--function FILE:NAME` or a run file names; the file is run, like any script."""

import sys
from collections.abc import Callable
from contextlib import suppress
from inspect import isfunction
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from penstock.errors import ConfigError, FormatError, nearest, shortened
from penstock.schedules.third_party import run_third_party


def load_function(place: str, key: str = "--function") -> Callable[..., Any]:
    """Return the function at `FILE:NAME`; `key` is where a user named it.

    Raises:
        ConfigError: if there is no such file or function, or the file fails when it runs.
        FormatError: if the file is not Python.
    """
    file, colon, name = place.rpartition(":")
    if not colon or not file or not name.isidentifier():
        raise ConfigError(f"{shortened(place)} is not of the form FILE:NAME, such as mine.py:zigzag", key=key)
    path = Path(file)
    module = _run_as_module(path, _compiled(path, key))
    function = getattr(module, name, None)
    if not callable(function):
        functions = [
            function_name
            for function_name, value in vars(module).items()
            if isfunction(value) and value.__module__ == module.__name__ and not function_name.startswith("_")
        ]
        listed = ", ".join(functions) or "none"
        raise ConfigError(
            f"{file} has no function {shortened(name)}; its functions: {listed}.{nearest(name, functions)}", key=key
        )
    return function  # type: ignore[no-any-return]


def _compiled(path: Path, key: str) -> CodeType:
    try:
        return compile(path.read_bytes(), str(path), "exec")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}). Give the path of a Python file", key=key
        ) from error
    except SyntaxError as error:
        place = {"line": error.lineno or 1, "column": error.offset or 1}
        raise FormatError(f"not Python: {error.msg}", file=str(path), **place) from error
    except ValueError as error:
        raise FormatError(f"not Python: {error}", file=str(path)) from error


def _run_as_module(path: Path, code: CodeType) -> ModuleType:
    module = ModuleType(f"penstock_user_{path.stem}")  # no name of another module, whatever the file is called
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look there for the module that they are in
    entry = str(path.parent.resolve())
    sys.path.insert(0, entry)  # modules of its folder are found, as for a script there
    try:
        run_third_party(str(path), lambda: exec(code, vars(module)))
    finally:
        with suppress(ValueError):
            sys.path.remove(entry)
    return module
