"""Reads schedules and programs from files and texts, whichever of the formats they are in."""

import re
from pathlib import Path

from penstock.errors import ConfigError, FormatError
from penstock.ir.formats.json_text import PROGRAM_FORMAT, kind_of_json
from penstock.ir.grid import from_grid
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule

_COMMUNICATION = re.compile(r"SEND|RECV|SHARD|REDUCE|STEP")


def read_table(text: str, *, file: str = "<text>", name: str | None = None) -> Schedule | Program:
    """Read JSON, CSV of actions, CSV with communication, or a drawn grid; the text itself says which it is.

    Raises:
        FormatError: where the text does not follow its format.
    """
    text = text.removeprefix("\ufeff")
    if text.lstrip().startswith(("{", "[")):
        is_program = kind_of_json(text, file=file) == PROGRAM_FORMAT
        return Program.from_json(text, file=file) if is_program else Schedule.from_json(text, file=file)
    if _COMMUNICATION.search(text):
        return Program.from_csv(text, file=file, name=name or "from CSV")
    if "," not in text and len(text.split()) > text.count("\n") + 1:
        return from_grid(text, file=file, name=name or "from a grid")
    return Schedule.from_csv(text, file=file, name=name or "from CSV")


def read_schedule(path: Path) -> Schedule:
    """Read a schedule file; its name becomes the schedule's where the format holds none.

    Raises:
        ConfigError: if the file cannot be read.
        FormatError: if it is no schedule.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"byte {error.start} is not UTF-8"
        problem = f"cannot read {str(path)!r}: {reason}; give the path of a schedule file"
        raise ConfigError(problem, key="schedule") from None
    table = read_table(text, file=str(path), name=path.stem)
    if isinstance(table, Program):
        raise FormatError("holds a program with communication; expected a schedule of F, B, I and W", file=str(path))
    return table
