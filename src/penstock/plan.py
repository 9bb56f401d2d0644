"""Planning on one page: build, check, lower, check, simulate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.check import check
from penstock.errors import ConfigError
from penstock.ir.program import Program
from penstock.ir.reading import read_schedule
from penstock.ir.schedule import Schedule
from penstock.ir.timeline import Timeline
from penstock.lower import lower
from penstock.schedules import FAMILIES, build
from penstock.simulate import Costs, simulate

DEFAULT_MICROBATCHES = 8


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A proved schedule, its proved program, and what is predicted of it."""

    schedule: Schedule
    program: Program
    timeline: Timeline


def plan(
    schedule: Schedule,
    costs: Costs,
    *,
    memory_limit: int | Sequence[int] | None = None,
    tied_groups: Sequence[Sequence[int]] = (),
    optimizer_step: bool = False,
) -> Plan:
    """Prove a schedule, lower it, prove the program, and simulate it.

    `memory_limit` counts activations, one number or one per rank.

    Raises:
        ScheduleError: if a proof fails; it lists every violation.
    """
    program = prove_and_lower(
        schedule, memory_limit=memory_limit, tied_groups=tied_groups, optimizer_step=optimizer_step
    )
    return Plan(schedule, program, simulate(program, costs))


def prove_and_lower(
    schedule: Schedule,
    *,
    memory_limit: int | Sequence[int] | None = None,
    tied_groups: Sequence[Sequence[int]] = (),
    optimizer_step: bool = False,
) -> Program:
    """Prove a schedule, lower it, and prove the program: all that must hold before a first step."""
    check(schedule, memory_limit=memory_limit)
    program = lower(schedule, tied_groups=tied_groups, optimizer_step=optimizer_step)
    check(program, memory_limit=memory_limit)
    return program


def resolve_schedule(
    schedule: str | Path | Schedule,
    *,
    ranks: int,
    microbatches: int | None = None,
    stages_per_rank: int | None = None,
    options: Mapping[str, Any],
) -> Schedule:
    """Return a schedule by its family's name, from a file, or as given; it must be for these numbers.

    Without a number of `microbatches`, a family gets 8, and a schedule that is given whole keeps its own.

    Raises:
        ConfigError: if there is no such name or file, or the schedule is for other numbers of ranks or microbatches.
        FormatError: if the file cannot be read as a schedule.
    """
    if isinstance(schedule, str) and (schedule in FAMILIES or not Path(schedule).suffix):
        number = DEFAULT_MICROBATCHES if microbatches is None else microbatches
        return build(schedule, ranks=ranks, microbatches=number, stages_per_rank=stages_per_rank, **options)
    if options:
        name = next(iter(options))
        raise ConfigError("is no option here; a schedule that is given whole takes no options of a family", key=name)
    found = schedule if isinstance(schedule, Schedule) else read_schedule(Path(schedule))
    if found.num_ranks != ranks:
        raise ConfigError(
            f"{found.name} is for {found.num_ranks} ranks, but {ranks} run; start {found.num_ranks} processes, or "
            "give a schedule for as many ranks as run",
            key="schedule",
        )
    if microbatches not in (None, found.num_microbatches):
        raise ConfigError(
            f"{microbatches}, but {found.name} is for {found.num_microbatches} microbatches; make them equal",
            key="microbatches",
        )
    return found
