"""Writes schedules and programs as text, in every format that `reading` reads."""

from collections.abc import Callable

from penstock.errors import ConfigError, nearest, shortened
from penstock.ir.formats.deepspeed import to_deepspeed
from penstock.ir.formats.megatron import to_megatron
from penstock.ir.grid import to_grid
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule

Table = Schedule | Program


def write_table(table: Table, format: str) -> str:
    """Write a table in one of `formats.WRITABLE`; the text ends with a newline.

    Of a program, DeepSpeed's listings take the order of its actions, and its messages are their own.

    Raises:
        ConfigError: for an unknown format, and for a table that the format cannot express.
    """
    if format not in WRITERS:
        formats = ", ".join(WRITERS)
        raise ConfigError(
            f"{shortened(format)} is none that can be written; known: {formats}.{nearest(format, WRITERS)}",
            key="format",
        )
    text = WRITERS[format](table)
    return text if text.endswith("\n") else f"{text}\n"


def _to_megatron(table: Table) -> str:
    if isinstance(table, Program):
        raise ConfigError(
            "a table of Megatron-LM has no communication; write the schedule, not the program", key="format"
        )
    return to_megatron(table)


WRITERS: dict[str, Callable[[Table], str]] = {
    "csv": lambda table: table.to_csv(),
    "json": lambda table: table.to_json(),
    "grid": lambda table: to_grid(table),
    "deepspeed": lambda table: to_deepspeed(table.actions()),
    "deepspeed-old": lambda table: to_deepspeed(table.actions(), old=True),
    "megatron": _to_megatron,
}
