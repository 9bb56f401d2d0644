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
"""Every family that trains; with options, each gets them."""
SHAPE_KEYS = ("stages_per_rank", "stages", "slices")
"""Numbers of its shape that a single NAME may give, beside the options of its family."""
FORWARD_ONLY = "forward-only"
RESERVED = ("name", "ranks", "microbatches", "forward_only")
"""Arguments of `build` that all NAMEs have in common."""

_PYTHON = re.compile(r".+\.py(:\w+)?")
_WITH_OPTIONS = re.compile(r"(.+?):([A-Za-z_][\w-]*=.*)")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A schedule that exists by name; `make` makes it, and refuses a shape that it cannot have."""

    text: str
    """As it was written on the command line."""
    is_built_in: bool
    make: Callable[[], Schedule]
    sharding: Sharding = NOT_SHARDED
    replicas: int | None = None
    """As many as are asked for; None: none are, and 0: those of the costs."""


def wanted_schedule(arguments: Namespace) -> Schedule:
    """Make the one schedule that NAME or --function names; what does not come with Penstock is proved."""
    if (arguments.name is None) == (arguments.function is None):
        arguments.wrong_usage("give either NAME or --function FILE:NAME")
    is_function = arguments.name is None
    wanted = find_function(arguments.function, arguments) if is_function else find_wanted(arguments.name, arguments)
    schedule = wanted.make()
    if not wanted.is_built_in:
        check(replace(schedule, name=wanted.text))
    return schedule


def wanted_schedules(arguments: Namespace) -> list[Wanted]:
    """Find all schedules that NAMEs and --function name, in this order.

    Raises:
        ConfigError, FormatError: if there is no such family, file or function.
    """
    if not arguments.names and not arguments.functions:
        arguments.wrong_usage("give at least one NAME or --function FILE:NAME")
    names = names_wanted(arguments)
    if names != arguments.names and None in (arguments.ranks, arguments.microbatches):
        arguments.wrong_usage(f"{ALL} needs --ranks P and --microbatches M")
    found = [find_wanted(text, arguments) for text in names]
    return found + [find_function(text, arguments) for text in arguments.functions]


def names_wanted(arguments: Namespace) -> list[str]:
    """Return the NAMEs, with those of all families, installed ones among them, in the place of `all`."""
    found: list[str] = []
    for text in arguments.names:
        name, colon, options = text.partition(":")
        if name != ALL:
            found.append(text)
            continue
        families = [*FAMILIES, *installed_families()[0]]
        wanted = [each for each in families if arguments.forward_only or each != FORWARD_ONLY]
        found += [each + colon + options for each in wanted if each + colon + options not in arguments.names]
    return found


def find_wanted(text: str, arguments: Namespace) -> Wanted:
    """Find what a NAME stands for: a family, or a file that is there under this name."""
    name, options = _split(text, arguments)
    if python := _PYTHON.fullmatch(name):
        place = python[0] if python[1] else f"{name}:NAME"
        raise ConfigError(f"{name} is Python, which only --function runs: write --function {place} instead")
    if name not in FAMILIES and (name == STDIN or not is_family_name(name) or Path(name).is_file()):
        return Wanted(text, False, partial(_as_asked, _read(name), name, arguments, options))
    family, colon, _ = name.partition(":")
    if colon and family in FAMILIES:
        raise ConfigError(f"there is no schedule {shortened(name)}; options of {family} are written {family}:key=value")
    find_family(name)
    return Wanted(text, name in FAMILIES, _builder(name, arguments, options))


def find_function(text: str, arguments: Namespace) -> Wanted:
    """Find the function that --function names."""
    place, options = _split(text, arguments)
    with redirect_stdout(sys.stderr):
        function = load_function(place)
    return Wanted(text, False, partial(_make_aside, _builder(function, arguments, options)))


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
    """The schedule in a file or on standard input; a program's own communication is left out."""
    file, title = ("<stdin>", "stdin") if name == STDIN else (name, Path(name).stem)
    return read_table(read_text(name), file=file, name=title).actions()


def _as_asked(table: Schedule, name: str, arguments: Namespace, options: Options) -> Schedule:
    """A schedule that was given whole, if it is what the other arguments ask for."""
    for key in options:
        raise ConfigError(f"{name} is a file, which takes no options; leave out {key}={options[key]}", key=key)
    per_rank = arguments.stages_per_rank
    asked = {
        "ranks": (table.num_ranks, arguments.ranks),
        "microbatches": (table.num_microbatches, arguments.microbatches),
        "stages_per_rank": (table.num_stages, per_rank and per_rank * table.num_ranks),
        "stages": (table.num_stages, arguments.stages),
        "slices": (table.num_slices, arguments.slices),
    }
    for key, (count, wanted) in asked.items():
        if wanted not in (None, count):
            raise ConfigError(f"{wanted} asked for, but {name} has {count}; a file keeps its own shape", key=key)
    return table.forward_only() if arguments.forward_only and not table.is_forward_only else table


def _split(text: str, arguments: Namespace) -> tuple[str, dict[str, str]]:
    """The name without its options, and all options that it gets: its own and those of --set."""
    found = _WITH_OPTIONS.fullmatch(text)
    name, own = (found[1], found[2].split(",")) if found else (text, [])
    common, mine = parse_options(arguments.options), parse_options(own, before=f"{name}:")
    for key in common.keys() & mine.keys():
        both = f"{name}:{key}={mine[key]} and --set {key}={common[key]}"
        raise ConfigError(f"{key} is given twice, {both}; keep one")
    options = common | mine
    for key in options:
        if key in RESERVED:
            raise ConfigError("not an option of a schedule; use the argument of the command", key=key)
    return name, options


def parse_options(texts: list[str], *, before: str = "--set ") -> dict[str, str]:
    """Read `key=value` texts; `before` is the text before each.

    Raises:
        ConfigError: for a text of another form, and for a key given twice.
    """
    options: dict[str, str] = {}
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        name = key.replace("-", "_")
        if not equals or not name.isidentifier():
            raise ConfigError(f"{before}{shortened(text)} is not of the form key=value, such as {before}warmup=eager")
        if name in options:
            both = f"{before}{name}={options[name]} and {before}{name}={value}"
            raise ConfigError(f"{name} is given twice, {both}; keep one")
        options[name] = value
    return options


def _number(key: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{shortened(text)} is not a number; give a whole number of 1 or more", key=key)
    return int(text)
