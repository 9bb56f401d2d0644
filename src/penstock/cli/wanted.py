"""The schedules that somebody names on the command line: families, files, and their own functions."""

import re
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.cli.check import read_text
from penstock.errors import ConfigError, shortened
from penstock.ir.reading import read_table
from penstock.ir.schedule import Schedule
from penstock.lowering import NOT_SHARDED, Sharding
from penstock.proofs import check
from penstock.schedules import FAMILIES, build, find_family, installed_families, is_family_name
from penstock.train.settings.user_function import load_function

Options = Mapping[str, str]
STDIN = "-"
ALL = "all"
"""The NAME that stands for every family that trains; options behind it are for all of them."""
SHAPE_KEYS = ("stages_per_rank", "stages", "slices")
"""The numbers of a schedule's shape that a NAME may have as options, beside those of its family."""
FORWARD_ONLY = "forward-only"
RESERVED = ("name", "ranks", "microbatches", "forward_only")
"""The arguments of `build` that all NAMEs have in common, so that a NAME has no option of these names."""

_PYTHON = re.compile(r".+\.py(:\w+)?")
_WITH_OPTIONS = re.compile(r"(.+?):([A-Za-z_][\w-]*=.*)")


@dataclass(frozen=True, slots=True)
class NamedSchedule:
    """A schedule that exists by name; `make` makes it, and refuses a shape that it cannot have."""

    text: str
    """The name as it was written on the command line."""
    is_built_in: bool
    make: Callable[[], Schedule]
    sharding: Sharding = NOT_SHARDED
    replicas: int | None = None
    """The number of replicas; 0: as many as the costs are of; None where no option asks for replicas."""


def make_named_schedule(arguments: Namespace) -> Schedule:
    """Make the one schedule that NAME or --function names; one that does not come with Penstock is proved."""
    if (arguments.name is None) == (arguments.function is None):
        arguments.wrong_usage("give either NAME or --function FILE:NAME")
    is_function = arguments.name is None
    named_schedule = (
        find_function(arguments.function, arguments) if is_function else find_schedule(arguments.name, arguments)
    )
    schedule = named_schedule.make()
    if not named_schedule.is_built_in:
        check(replace(schedule, name=named_schedule.text))
    return schedule


def find_schedules(arguments: Namespace) -> list[NamedSchedule]:
    """Find all schedules that NAMEs and --function name, in this order.

    Raises:
        ConfigError, FormatError: if there is no such family, file or function.
    """
    if not arguments.names and not arguments.functions:
        arguments.wrong_usage("give at least one NAME or --function FILE:NAME")
    names = expanded_names(arguments)
    if names != arguments.names and None in (arguments.ranks, arguments.microbatches):
        arguments.wrong_usage(f"{ALL} needs --ranks P and --microbatches M")
    schedules = [find_schedule(text, arguments) for text in names]
    return schedules + [find_function(text, arguments) for text in arguments.functions]


def expanded_names(arguments: Namespace) -> list[str]:
    """Return the NAMEs, with the names of all families, installed ones among them, in the place of `all`."""
    all_names: list[str] = []
    for text in arguments.names:
        name, colon, options = text.partition(":")
        if name != ALL:
            all_names.append(text)
            continue
        families = [*FAMILIES, *installed_families()[0]]
        family_names = [family for family in families if arguments.forward_only or family != FORWARD_ONLY]
        all_names += [
            family + colon + options for family in family_names if family + colon + options not in arguments.names
        ]
    return all_names


def find_schedule(text: str, arguments: Namespace) -> NamedSchedule:
    """Find the schedule of a NAME: of a family, or of an existing file."""
    name, options = _split(text, arguments)
    if python := _PYTHON.fullmatch(name):
        place = python[0] if python[1] else f"{name}:NAME"
        raise ConfigError(f"{name} is Python, which only --function runs: write --function {place} instead")
    if name not in FAMILIES and (name == STDIN or not is_family_name(name) or Path(name).is_file()):
        return NamedSchedule(text, False, partial(_require_requested_shape, _read(name), name, arguments, options))
    family, colon, _ = name.partition(":")
    if colon and family in FAMILIES:
        raise ConfigError(f"there is no schedule {shortened(name)}; options of {family} are written {family}:key=value")
    find_family(name)
    return NamedSchedule(text, name in FAMILIES, _builder(name, arguments, options))


def find_function(text: str, arguments: Namespace) -> NamedSchedule:
    """Find the function that --function names."""
    place, options = _split(text, arguments)
    with redirect_stdout(sys.stderr):
        function = load_function(place)
    return NamedSchedule(text, False, partial(_make_aside, _builder(function, arguments, options)))


def _make_aside(make: Callable[[], Schedule]) -> Schedule:
    """Run a user's function; what it prints is no part of the result, which may be a file in the making."""
    with redirect_stdout(sys.stderr):
        return make()


def _builder(name: str | Callable[..., Any], arguments: Namespace, options: Options) -> Callable[[], Schedule]:
    if None in (arguments.ranks, arguments.microbatches):
        shown = name if isinstance(name, str) else name.__name__
        arguments.wrong_usage(f"{shown} needs --ranks P and --microbatches M")
    chosen: dict[str, Any] = {**options, "ranks": arguments.ranks, "microbatches": arguments.microbatches}
    for key in SHAPE_KEYS:
        number = _number(key, options[key]) if key in options else getattr(arguments, key)
        chosen |= {key: number} if number is not None else {}
    return partial(build, name, forward_only=arguments.forward_only, **chosen)


def _read(name: str) -> Schedule:
    """Read a schedule from a file or standard input; a program's own communication is left out."""
    file, title = ("<stdin>", "stdin") if name == STDIN else (name, Path(name).stem)
    return read_table(read_text(name), file=file, name=title).actions()


def _require_requested_shape(table: Schedule, name: str, arguments: Namespace, options: Options) -> Schedule:
    """Return the schedule of a file, if it has the shape that the arguments ask for. Raises: ConfigError."""
    for key in options:
        raise ConfigError(f"{name} is a file, which takes no options; leave out {key}={options[key]}", key=key)
    per_rank = arguments.stages_per_rank
    counts_by_key = {
        "ranks": (table.num_ranks, arguments.ranks),
        "microbatches": (table.num_microbatches, arguments.microbatches),
        "stages_per_rank": (table.num_stages, per_rank and per_rank * table.num_ranks),
        "stages": (table.num_stages, arguments.stages),
        "slices": (table.num_slices, arguments.slices),
    }
    for key, (count, requested) in counts_by_key.items():
        if requested not in (None, count):
            raise ConfigError(f"{requested} asked for, but {name} has {count}; a file keeps its own shape", key=key)
    return table.forward_only() if arguments.forward_only and not table.is_forward_only else table


def _split(text: str, arguments: Namespace) -> tuple[str, dict[str, str]]:
    """Return a name without its options, and all options that it gets: its own and those of --set."""
    match = _WITH_OPTIONS.fullmatch(text)
    name, own_texts = (match[1], match[2].split(",")) if match else (text, [])
    common, own_options = parse_options(arguments.options), parse_options(own_texts, prefix=f"{name}:")
    for key in common.keys() & own_options.keys():
        clash = f"{name}:{key}={own_options[key]} and --set {key}={common[key]}"
        raise ConfigError(f"{key} is given twice, {clash}; keep one")
    options = common | own_options
    for key in options:
        if key in RESERVED:
            raise ConfigError("not an option of a schedule; use the argument of the command", key=key)
    return name, options


def parse_options(texts: list[str], *, prefix: str = "--set ") -> dict[str, str]:
    """Read `key=value` texts; messages show `prefix` before each.

    Raises:
        ConfigError: for a text of another form, and for a key given twice.
    """
    options: dict[str, str] = {}
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        name = key.replace("-", "_")
        if not equals or not name.isidentifier():
            raise ConfigError(f"{prefix}{shortened(text)} is not of the form key=value, such as {prefix}warmup=eager")
        if name in options:
            clash = f"{prefix}{name}={options[name]} and {prefix}{name}={value}"
            raise ConfigError(f"{name} is given twice, {clash}; keep one")
        options[name] = value
    return options


def _number(key: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{shortened(text)} is not a number; give a whole number of 1 or more", key=key)
    return int(text)
