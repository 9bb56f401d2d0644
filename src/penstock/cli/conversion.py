"""Texts of schedules and programs: read, and written in another format, proved on the way."""

from dataclasses import replace

from penstock.cli.describe import describe_plan
from penstock.ir.formats import WITH_COMMUNICATION
from penstock.ir.program import Program
from penstock.ir.reading import format_of, read_table
from penstock.ir.schedule import Schedule
from penstock.ir.writing import write_table
from penstock.lowering import assign_slots, lower
from penstock.proofs import check


def read_plan(text: str, *, file: str, name: str | None = None, format: str | None = None) -> Schedule | Program:
    """Read a schedule or program, by default in the format of its content; `name` is for a text without one.

    Raises:
        FormatError: with line and column, for a text that cannot be read.
    """
    format = format or format_of(text)
    plan = read_table(text, file=file, name=name, format=format)
    # CSV has no place for slots.
    return assign_slots(plan) if isinstance(plan, Program) and format == "csv" else plan


def convert(plan: Schedule | Program, format: str, *, file: str, is_lowered: bool = False) -> tuple[str, str]:
    """Return the text of a proved plan, lowered if that is wanted, and the plan in words.

    Formats that cannot hold communication drop it. `file` is what errors name.

    Raises:
        ConfigError: if the new format cannot express the plan.
        ScheduleError: if it is wrong.
    """
    if format not in WITH_COMMUNICATION:
        plan = plan.actions()
    facts = check(replace(plan, name=file))
    if is_lowered and isinstance(plan, Schedule):
        plan = lower(plan)
        facts = check(plan)
    return write_table(plan, format), describe_plan(plan, facts)
