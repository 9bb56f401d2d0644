"""One text of a schedule or program into another: read, with or without communication as wanted, proved, written."""

from dataclasses import dataclass, replace

from penstock.cli.describe import describe_plan
from penstock.errors import ConfigError
from penstock.ir.formats import WITH_COMMUNICATION
from penstock.ir.program import Program
from penstock.ir.reading import format_of, read_table
from penstock.ir.schedule import Schedule
from penstock.ir.writing import write_table
from penstock.lowering import assign_slots, lower
from penstock.proofs import check


@dataclass(frozen=True, slots=True)
class Source:
    """A text, and where it comes from."""

    text: str
    file: str
    name: str | None = None
    """What the schedule is called where the text does not say so."""
    format: str | None = None
    """None: its content decides."""


@dataclass(frozen=True, slots=True)
class Target:
    """What the text shall become."""

    format: str
    is_lowered: bool = False
    """Whether communication is added where there is none."""
    is_compute_only: bool = False
    """Whether communication is dropped; formats that cannot hold it drop it anyway."""


@dataclass(frozen=True, slots=True)
class Converted:
    """The new text, and the proved plan that it holds in words."""

    text: str
    summary: str


def convert(source: Source, target: Target) -> Converted:
    """Convert a text; what is written has been proved.

    Raises:
        FormatError: with line and column, for a text that cannot be read.
        ConfigError: if the new format cannot express the schedule.
        ScheduleError: if it is wrong.
    """
    if target.is_lowered and target.format in ("grid", "megatron"):
        formats = " or ".join(WITH_COMMUNICATION)
        raise ConfigError(f"{target.format} holds actions alone; write {formats} to add communication", key="--lowered")
    plan = _plan(source, target)
    facts = check(replace(plan, name=source.file))
    if target.is_lowered and isinstance(plan, Schedule):
        plan = lower(plan)
        facts = check(plan)
    return Converted(write_table(plan, target.format), describe_plan(plan, facts))


def _plan(source: Source, target: Target) -> Schedule | Program:
    chosen = source.format or format_of(source.text)
    table = read_table(source.text, file=source.file, name=source.name, format=chosen)
    if target.is_compute_only or target.format not in WITH_COMMUNICATION:
        return table.actions()
    if isinstance(table, Program) and chosen == "csv":
        return assign_slots(table)  # CSV has no place for slots
    return table
