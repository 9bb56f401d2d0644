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
from penstock.cli.wanted import Wanted, names_wanted, wanted_schedules
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
"""Keys that change nothing, by the way to shard."""
EXAMPLE, EXAMPLE_OF_LIMITS = "microbatches=8..64", "memory_limit=8GiB..64GiB"
MOST_SCHEDULES = 300
"""That one sweep may simulate."""

_RANGE = re.compile(r"(\d+)\.\.(\d+)(?::(\d+))?")
_UNIT = re.compile(r"\s*[A-Za-z]+")

Sweep = Mapping[str, tuple[Any, ...]]
"""Values by key, in the order in which the keys were given: numbers, or limits of memory."""


def read_sweep(texts: Sequence[str], keys: Sequence[str] = KEYS) -> Sweep:
    """Read all sweeps of a command that sweeps these keys.

    Raises:
        ConfigError: for an unknown key, one given twice, and values that are none of the three forms.
    """
    example = EXAMPLE if keys == KEYS else EXAMPLE_OF_LIMITS
    found: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        key, equals, values = (part.strip() for part in text.partition("="))
        key = key.replace("-", "_")
        if not equals:
            raise ConfigError(f"{shortened(text)} is not of the form KEY=VALUES, such as {example}", key="--sweep")
        if key not in keys:
            known = ", ".join(keys)
            raise ConfigError(f"{shortened(key)} cannot be swept; known: {known}.{nearest(key, keys)}", key="--sweep")
        if key in found:
            raise ConfigError(f"{key} is given twice; put all values into one", key="--sweep")
        found[key] = _read(values, key)
    return found


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


def swept_schedules(arguments: Namespace, sweep: Sweep) -> list[Wanted]:
    """Find every schedule at every combination of sizes; what they are called says the sizes.

    Raises:
        ConfigError: if a size is given beside its sweep, or there are too many combinations.
    """
    sizes = {key: values for key, values in sweep.items() if key != LIMITS}
    require_given_once(arguments, sweep)
    num_names = len(names_wanted(arguments)) + len(arguments.functions)
    count = num_names
    for values in sizes.values():
        count *= len(values)
    if count > MOST_SCHEDULES:
        raise ConfigError(
            f"{count:,} schedules to simulate ({' x '.join(str(len(values)) for values in sizes.values())} sizes of "
            f"{num_names}); at most {MOST_SCHEDULES}, sweep fewer values",
            key="--sweep",
        )
    found: list[Wanted] = []
    done = []
    for values in product(*sizes.values()):
        chosen = dict(zip(sizes, values, strict=True))
        chosen = {key: value for key, value in chosen.items() if key not in IDLE.get(chosen.get("shard", ""), ())}
        if chosen in done:
            continue
        done.append(chosen)
        at_size = Namespace(**(vars(arguments) | chosen))
        sharding, replicas = sharding_of(at_size), replicas_of(at_size, 0)
        found += [
            replace(wanted, text=_label(wanted.text, chosen), sharding=sharding, replicas=replicas)
            for wanted in wanted_schedules(at_size)
        ]
    return found


def _label(name: str, chosen: Mapping[str, Any]) -> str:
    return ", ".join([name, *(LABELS[key](number) for key, number in chosen.items())])


def _read_limits(text: str) -> tuple[Limit, ...]:
    """Values of limits; the unit of all stands behind the last one, or behind each."""
    units = _UNIT.findall(text)
    if len({unit.strip().lower() for unit in units}) > 1:
        problem = f"expected one unit for all values, such as {EXAMPLE_OF_LIMITS}"
        raise ConfigError(f"{LIMITS}: {problem}, got {shortened(text)}", key="--sweep")
    unit = f" {units[0].strip()}" if units else ""
    return tuple(Limit.read(f"{number}{unit}", "--sweep") for number in _read_values(_UNIT.sub("", text), LIMITS, text))


def _read_values(text: str, key: str, given: str | None = None) -> tuple[int, ...]:
    """Read numbers; `given` is what an error shows, unless it is the text itself."""
    ends, smallest = _RANGE.fullmatch(text), 0 if key in FROM_0 else 1
    values = _between(ends) if ends else _listed(text)
    if not values or min(values) < smallest:
        raise ConfigError(
            f"{key}: expected whole numbers from {smallest}, such as 8..64 (doubled), 8..64:8 (in steps) or 8,16,24, "
            f"got {shortened(given or text)}",
            key="--sweep",
        )
    return tuple(dict.fromkeys(values))


def _listed(text: str) -> list[int]:
    parts = text.split(",")
    return [int(part) for part in parts] if all(re.fullmatch(r"\s*\d+\s*", part) for part in parts) else []


def _between(ends: "re.Match[str]") -> list[int]:
    first, last = int(ends[1]), int(ends[2])
    if ends[3] is None:
        return [first << power for power in range((last // first).bit_length())] if 0 < first <= last else []
    step = int(ends[3])
    count = (last - first) // step + 1 if step and first <= last else 0
    if count > MOST_SCHEDULES:
        raise ConfigError(f"{ends[0]} are {count:,} values; at most {MOST_SCHEDULES}, take larger steps", key="--sweep")
    return list(range(first, last + 1, step)) if count else []
