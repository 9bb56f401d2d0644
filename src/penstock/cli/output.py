"""Where commands print and write: results to standard output or a file, complaints to standard error."""

import codecs
import os
import shutil
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from penstock.errors import ConfigError
from penstock.tables import Screen

SPELLED = {"─": "-", "µ": "u"}
"""Spellings of Penstock's own characters that the output's encoding may lack; others become a question mark."""
MIN_WIDTH = 20


def say(text: str, *, at_once: bool = False) -> None:
    """Print a result; with `at_once`, it is seen before the work that it announces begins."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    if at_once:
        sys.stdout.flush()


def say_piece(text: str) -> None:
    """Print a part of a line, as soon as it is there."""
    sys.stdout.write(text)
    sys.stdout.flush()


def complain(text: str) -> None:
    """Print what went wrong."""
    sys.stderr.write(f"penstock: {text}\n")


def screen_of(stream: TextIO, environment: Mapping[str, str]) -> Screen:
    """Return the size of the terminal that a stream writes to, and whether it takes color (NO_COLOR, TERM=dumb)."""
    if not stream.isatty():
        return Screen()
    has_color = not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
    size = shutil.get_terminal_size()
    return Screen(max(size.columns, MIN_WIDTH), has_color, size.lines)


def stdout_screen() -> Screen:
    """Return the screen that results are printed on."""
    return screen_of(sys.stdout, os.environ)


def open_closed_streams() -> None:
    """Point standard streams that are closed at nothing: files would get their numbers, and their text, otherwise."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, mode))


def replace_unknown_characters() -> None:
    """Let standard streams write text that their encoding cannot hold, instead of failing."""
    codecs.register_error("spelled", _spelled)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="spelled")


def _spelled(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(SPELLED.get(character, "?") for character in error.object[error.start : error.end]), error.end


def path_to_write(name: str, *, is_forced: bool, key: str) -> Path:
    """Return the path of a file to write; `key` is the argument that names it.

    Raises:
        ConfigError: a file exists there and `is_forced` is false, or something that is no file, such as a folder; or
            the folder that it belongs into is none.
    """
    path = Path(name)
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is not a folder; make it first", key=key)
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a regular file; give another name", key=key)
    if path.exists() and not is_forced:
        raise ConfigError(f"{path} exists; give another name, or --force to replace it", key=key)
    return path


def forget_stdout() -> None:
    """Point standard output at nothing: its reader is gone, and the interpreter's last flush must not complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def may_be_full(stream: TextIO) -> bool:
    """Whether a stream goes to a file or a device that can refuse what is written; a pipe or a terminal cannot."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
        return not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stream.isatty())
    except (OSError, ValueError):  # closed, or no file of the system's
        return True
