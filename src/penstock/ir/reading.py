"""Reads schedules and programs from files and texts, whichever of the formats they are in."""

import re
from collections.abc import Callable
from pathlib import Path

from penstock.errors import MAX_PATH_CHARACTERS, ConfigError, nearest, shortened
from penstock.ir.formats import deepspeed, megatron
from penstock.ir.formats.json_text import PROGRAM_FORMAT, kind_of_json
from penstock.ir.formats.timeline_json import TIMELINE_FORMAT
from penstock.ir.grid import from_grid
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.ir.timeline import Timeline

MOST_BEGIN = 100
"""Characters at the beginning of a JSON file, in which its format is named."""
_COMMUNICATION = re.compile(r"SEND|RECV|SHARD|REDUCE|STEP")
_COMMENT = re.compile(r"^[ \t]*#.*\n?", re.MULTILINE)
_LABELLED = re.compile(r"^[ \t]*rank[ \t]+[0-9]", re.MULTILINE)


def read_table(
    text: str, *, file: str = "<text>", name: str | None = None, format: str | None = None
) -> Schedule | Program:
    """Read a schedule or a program; without a `format` (one of `formats.READABLE`), the text itself tells which.

    `name` becomes the schedule's where the format holds none.

    Raises:
        ConfigError: for an unknown format.
        FormatError: where the text does not follow its format.
    """
    text = text.removeprefix("\ufeff")
    format_name = format_of(text) if format is None else format
    if format_name not in READERS:
        formats = ", ".join(READERS)
        raise ConfigError(
            f"{shortened(format_name)} is none that can be read; known: {formats}.{nearest(format_name, READERS)}",
            key="format",
        )
    return READERS[format_name](text, file, name)


def format_of(text: str) -> str:
    """Return which of `formats.READABLE` a text seems to be in."""
    start = text.removeprefix("\ufeff").lstrip()
    if start.startswith(("{", "[")):
        return "json"
    for name, title in (("deepspeed", deepspeed.TITLE), ("megatron", megatron.TITLE)):
        if start[: len(title)].lower() == title.lower():
            return name
    bare = _COMMENT.sub("", text)
    is_grid = "," not in bare and len(bare.split()) > bare.count("\n") + 1 and not _COMMUNICATION.search(bare)
    return "grid" if is_grid or _LABELLED.search(bare) else "csv"


def read_file(path: Path) -> Schedule | Program:
    """Read the file of a schedule or program; its name becomes the schedule's where the format holds none.

    Raises:
        ConfigError: if the file cannot be read.
        FormatError: if it holds neither.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"byte {error.start} is not UTF-8"
        problem = f"cannot read {shortened(str(path), MAX_PATH_CHARACTERS)}: {reason}; give the path of a schedule file"
        raise ConfigError(problem, key="schedule") from None
    return read_table(text, file=str(path), name=path.stem)


def _read_csv(text: str, file: str, name: str | None) -> Schedule | Program:
    table = Program if _COMMUNICATION.search(text) else Schedule
    return table.from_csv(text, file=file, name=name or "from CSV")


def _read_json(text: str, file: str, name: str | None) -> Schedule | Program:
    """Read a schedule, a program, or the program that a recorded step ran."""
    if TIMELINE_FORMAT in text[:MOST_BEGIN]:
        return Timeline.from_json(text, file=file).program
    table = Program if kind_of_json(text, file=file) == PROGRAM_FORMAT else Schedule
    return table.from_json(text, file=file)


READERS: dict[str, Callable[[str, str, str | None], Schedule | Program]] = {
    "csv": _read_csv,
    "json": _read_json,
    "grid": lambda text, file, name: from_grid(text, file=file, name=name or "from a grid"),
    "deepspeed": lambda text, file, name: deepspeed.from_deepspeed(text, file=file, name=name or "from DeepSpeed"),
    "megatron": lambda text, file, name: megatron.from_megatron(text, file=file, name=name or "from Megatron"),
}
"""The readers by format; a reader takes the text, the file's name for errors, and the schedule's name."""
