"""Families of other distributions: entry points of the group `penstock.schedules`, each a `Family`.

In the `pyproject.toml` of such a distribution:

    [project.entry-points."penstock.schedules"]
    zigzag = "my_schedules:ZIGZAG"

They are looked for only when a name is none of ours, or when all families are listed. One that cannot be used is
reported in a line and leaves the others alone.
"""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeGuard

from penstock.errors import ConfigError
from penstock.ir.schedule import Schedule
from penstock.schedules.family import Family, Shape
from penstock.schedules.options import Options
from penstock.schedules.third_party import as_schedule, require_sizes, run_third_party, sizes_of

GROUP = "penstock.schedules"
TEXTS = ("summary", "source", "placement", "restrictions", "bubble", "memory", "advice")
_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class PlugIn:
    """One entry point of our group, not loaded yet."""

    name: str
    distribution: str
    load: Callable[[], object]

    def family(self, built_in: Collection[str]) -> Family:
        """Load the family. Raises: ConfigError if it is no family that can be used under its name."""
        plug_in = f"plug-in {self.name!r} of {self.distribution}"
        if self.name in built_in:
            raise ConfigError(f"{plug_in} has the name of a family that comes with Penstock; give it another")
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"{plug_in} has a name that is not of letters, digits, - and _; give it another")
        family = run_third_party(plug_in, self.load)
        if not isinstance(family, Family):
            raise ConfigError(f"{plug_in} is of type {type(family).__name__}; expected a penstock.schedules.Family")
        if family.name != self.name:
            raise ConfigError(f"{plug_in} holds a family named {family.name!r}; give both the same name")
        for key in TEXTS:
            if not isinstance(getattr(family, key), str):
                raise ConfigError(f"{plug_in} has {getattr(family, key)!r} for its {key}; give a text")
        return replace(family, generate=lambda shape, options: _generate(family, shape, options))


def find_installed(name: str) -> PlugIn | None:
    """Look for one plug-in by its name, without loading any.

    Raises:
        ConfigError: if several distributions have this name.
    """
    of_name = [plug_in for plug_in in plug_ins() if plug_in.name == name]
    if len(of_name) > 1:
        owners = " and ".join(plug_in.distribution for plug_in in of_name)
        raise ConfigError(f"the schedule {name!r} comes from {owners}; uninstall all but one")
    return of_name[0] if of_name else None


def load_installed(built_in: Collection[str]) -> tuple[dict[str, Family], list[str]]:
    """Return the families of all plug-ins that can be used, and a line on each of the others."""
    families: dict[str, Family] = {}
    problems = []
    for name in sorted({plug_in.name for plug_in in plug_ins()}):
        try:
            plug_in = find_installed(name)
            if plug_in is not None:
                families[name] = plug_in.family(built_in)
        except ConfigError as error:
            problems.append(str(error))
    return families, problems


def plug_ins() -> list[PlugIn]:
    """List the entry points of our group; of a distribution that is there twice, the first counts, as for imports."""
    first_of_name: dict[tuple[str, str], PlugIn] = {}
    for plug_in in _all_plug_ins():
        first_of_name.setdefault((plug_in.distribution.lower(), plug_in.name), plug_in)
    return list(first_of_name.values())


def _all_plug_ins() -> Iterator[PlugIn]:
    from importlib import metadata  # 15 ms that only a name of another distribution needs

    for distribution in metadata.distributions():
        try:
            points = distribution.entry_points.select(group=GROUP)
        except Exception:  # a broken file of any distribution, most likely none of ours
            continue
        for point in points:
            yield PlugIn(point.name, str(distribution.metadata["Name"]), point.load)


def is_family_name(schedule: object) -> TypeGuard[str]:
    """Return whether what was given as a schedule is a text that looks like a family's name, not like a path."""
    return isinstance(schedule, str) and not Path(schedule).suffix and Path(schedule).name == schedule


def _generate(family: Family, shape: Shape, options: Options) -> Schedule:
    """Let a third-party family make its schedule, of the size that was asked for."""
    schedule = run_third_party(
        family.name, lambda: as_schedule(family.generate(shape, options), family.name, num_ranks=shape.num_ranks)
    )
    require_sizes(family.name, schedule, sizes_of(shape))
    return schedule
