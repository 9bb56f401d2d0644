"""`--sweep KEY=VALUES`: the same schedules, or a search, at several sizes and within several limits of memory.

microbatches=8,12,16     these values
microbatches=8..64       8, 16, 32, 64: doubled as long as they fit
microbatches=8..64:8     8, 16, 24, ..., 64: in steps of 8
memory_limit=10..40GiB   10GiB, 20GiB, 40GiB: the unit is that of all values; 10GiB..40GiB is the same
shard=none,full          these ways to shard
"""

import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from penstock.cli.given_costs import replicas_of, sharding_of
from penstock.cli.wanted import NamedSchedule, expanded_names, find_schedules
from penstock.errors import ConfigError, nearest, shortened
from penstock.lowering import NONE, OPTIMIZER, SHARDS
from penstock.proofs import Limit
from penstock.show.text import count_of

LABELS: dict[str, Callable[[Any], str]] = {
    "ranks": lambda number: count_of(number, "rank"),
    "microbatches": lambda number: count_of(number, "microbatch"),
    "stages_per_rank": lambda number: f"{count_of(number, 'stage')} per rank",
    "slices": lambda number: count_of(number, "slice"),
    "data": lambda number: count_of(number, "replica"),
    "shard": lambda shard: f"shard {shard}",
    "residency": lambda number: f"{count_of(number, 'stage')} whole" if number else "all stages whole",
    "look_ahead": lambda number: f"look-ahead {number}",
}
"""Ends of a schedule's name at a size, by the key of that size."""
LIMITS = "memory_limit"
KEYS = (*LABELS, LIMITS)
FROM_0 = ("residency", "look_ahead")
IDLE = {NONE: FROM_0, OPTIMIZER: FROM_0[:1]}
"""The keys that change nothing, by the way to shard."""
EXAMPLE, EXAMPLE_OF_LIMITS = "microbatches=8..64", "memory_limit=8GiB..64GiB"
MOST_SCHEDULES = 300
"""The most schedules that one sweep may simulate."""

_RANGE = re.compile(r"(\d+)\.\.(\d+)(?::(\d+))?")
_UNIT = re.compile(r"\s*[A-Za-z]+")

Sweep = Mapping[str, tuple[Any, ...]]
"""The swept values by key, in the order of the command line: numbers, ways to shard, or limits of memory."""


def read_sweep(texts: Sequence[str], keys: Sequence[str] = KEYS) -> Sweep:
    """Read all sweeps of a command that sweeps these keys.

    Raises:
        ConfigError: for an unknown key, one given twice, and values that are none of the three forms.
    """
    example = EXAMPLE if keys == KEYS else EXAMPLE_OF_LIMITS
    values_by_key: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        key, equals, values = (part.strip() for part in text.partition("="))
        key = key.replace("-", "_")
        if not equals:
            raise ConfigError(f"{shortened(text)} is not of the form KEY=VALUES, such as {example}", key="--sweep")
        if key not in keys:
            hint = nearest(key, keys)
            raise ConfigError(f"{shortened(key)} cannot be swept; known: {', '.join(keys)}.{hint}", key="--sweep")
        if key in values_by_key:
            raise ConfigError(f"{key} is given twice; put all values into one", key="--sweep")
        values_by_key[key] = _read(values, key)
    return values_by_key


def _read(text: str, key: str) -> tuple[Any, ...]:
    if key == LIMITS:
        return _read_limits(text)
    if key != "shard":
        return _read_values(text, key)
    shards = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    unknown = [shard for shard in shards if shard not in SHARDS]
    if unknown:
        expected = f"expected some of {', '.join(SHARDS)}, such as shard=none,full"
        raise ConfigError(f"shard: {expected}, got {shortened(unknown[0])}", key="--sweep")
    return shards


def require_given_once(arguments: Namespace, sweep: Sweep) -> None:
    """Refuse a key that is swept where its option is given too. Raises: ConfigError."""
    for key in sweep:
        if getattr(arguments, key) is not None:
            option = f"--{key.replace('_', '-')}"
            raise ConfigError(f"{key} is swept and given as {option} too; leave one out", key="--sweep")


def swept_schedules(arguments: Namespace, sweep: Sweep) -> list[NamedSchedule]:
    """Return every schedule that the arguments name, at every combination of the swept sizes, which are in its name.

    `sweep` has the values of each size, such as microbatches, by its key.

    Raises:
        ConfigError: if a size is given beside its sweep, or there are too many combinations.
    """
    sizes = {key: values for key, values in sweep.items() if key != LIMITS}
    require_given_once(arguments, sweep)
    num_names = len(expanded_names(arguments)) + len(arguments.functions)
    count = num_names
    for values in sizes.values():
        count *= len(values)
    if count > MOST_SCHEDULES:
        raise ConfigError(
            f"{count:,} schedules to simulate ({' x '.join(str(len(values)) for values in sizes.values())} sizes of "
            f"{num_names}); at most {MOST_SCHEDULES}, sweep fewer values",
            key="--sweep",
        )
    schedules: list[NamedSchedule] = []
    used_sizes = []
    for values in product(*sizes.values()):
        size = dict(zip(sizes, values, strict=True))
        # Drop keys that change nothing for this way to shard; what is then equal to an earlier combination is left out.
        size = {key: value for key, value in size.items() if key not in IDLE.get(size.get("shard", ""), ())}
        if size in used_sizes:
            continue
        used_sizes.append(size)
        at_size = Namespace(**(vars(arguments) | size))
        sharding, replicas = sharding_of(at_size), replicas_of(at_size, 0)
        schedules += [
            replace(schedule, text=_name_with_sizes(schedule.text, size), sharding=sharding, replicas=replicas)
            for schedule in find_schedules(at_size)
        ]
    return schedules


def _name_with_sizes(name: str, chosen: Mapping[str, Any]) -> str:
    return ", ".join([name, *(LABELS[key](number) for key, number in chosen.items())])


def _read_limits(text: str) -> tuple[Limit, ...]:
    """Read limits of memory; their unit stands behind the last value, or behind each."""
    units = _UNIT.findall(text)
    if len({unit.strip().lower() for unit in units}) > 1:
        problem = f"expected one unit for all values, such as {EXAMPLE_OF_LIMITS}"
        raise ConfigError(f"{LIMITS}: {problem}, got {shortened(text)}", key="--sweep")
    unit = f" {units[0].strip()}" if units else ""
    return tuple(Limit.read(f"{number}{unit}", "--sweep") for number in _read_values(_UNIT.sub("", text), LIMITS, text))


def _read_values(text: str, key: str, shown_text: str | None = None) -> tuple[int, ...]:
    """Read whole numbers; an error shows `shown_text`, by default the text itself."""
    match, smallest = _RANGE.fullmatch(text), 0 if key in FROM_0 else 1
    values = _between(match) if match else _listed(text)
    if not values or min(values) < smallest:
        raise ConfigError(
            f"{key}: expected whole numbers from {smallest}, such as 8..64 (doubled), 8..64:8 (in steps) or 8,16,24, "
            f"got {shortened(shown_text or text)}",
            key="--sweep",
        )
    return tuple(dict.fromkeys(values))


def _listed(text: str) -> list[int]:
    parts = text.split(",")
    return [int(part) for part in parts] if all(re.fullmatch(r"\s*\d+\s*", part) for part in parts) else []


def _between(match: "re.Match[str]") -> list[int]:
    first, last = int(match[1]), int(match[2])
    if match[3] is None:
        return [first << power for power in range((last // first).bit_length())] if 0 < first <= last else []
    step = int(match[3])
    count = (last - first) // step + 1 if step and first <= last else 0
    if count > MOST_SCHEDULES:
        raise ConfigError(
            f"{match[0]} are {count:,} values; at most {MOST_SCHEDULES}, take larger steps", key="--sweep"
        )
    return list(range(first, last + 1, step)) if count else []
