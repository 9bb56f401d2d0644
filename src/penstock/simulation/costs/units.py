"""Units in the keys of a file with costs: `forward_ms` is `forward_s` in milliseconds."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.errors import ConfigError, nearest
from penstock.ir.units import BYTES_OF_UNIT


@dataclass(frozen=True, slots=True)
class Unit:
    """How a number becomes seconds, bytes, or bytes per second: times one number, over the other."""

    times: float = 1
    over: float = 1
    is_bytes: bool = False

    def convert(self, number: float) -> float:
        """Return the number in the unit that the code uses; bytes are rounded where the unit is larger than one."""
        if self.is_bytes:
            converted = number * self.times
            return round(converted) if self.times > 1 and math.isfinite(converted) else converted
        return number * self.times / self.over


UNITS: dict[str, dict[str, Unit]] = {
    "s": {"s": Unit(), "ms": Unit(over=1e3), "us": Unit(over=1e6)},
    "bytes": {name: Unit(times, is_bytes=True) for name, times in BYTES_OF_UNIT.items()},
    "bytes_per_s": {
        "bytes_per_s": Unit(),
        "mb_per_s": Unit(1e6),
        "gb_per_s": Unit(1e9),
        "gib_per_s": Unit(2.0**30),
        "gbit_per_s": Unit(1e9, over=8),
    },
}
"""The units that a key may end in, by the unit in which the name of its field ends."""


def resolve_key(key: str, fields: Iterable[str], place: str = "") -> tuple[str, Unit]:
    """Find the field that a key sets, and the key's unit; `place` stands before the key in messages.

    Raises:
        ConfigError: if there is none, with the nearest keys or the units that the quantity has.
    """
    field_of_key = {name: (name, Unit()) for name in fields}
    names = list(field_of_key)
    units_of: dict[str, list[str]] = {}
    for name in names:
        quantity, base = _split(name)
        for suffix, unit in UNITS.get(base, {}).items():
            field_of_key[f"{quantity}_{suffix}"] = (name, unit)
            units_of.setdefault(quantity, []).append(suffix)
    if key in field_of_key:
        return field_of_key[key]
    quantity = max((name for name in units_of if key == name or key.startswith(f"{name}_")), key=len, default="")
    if quantity:
        raise ConfigError(
            f"has no unit that is known; end it in one of {', '.join(units_of[quantity])}", key=place + key
        )
    hint = nearest(key, field_of_key) or f" Known here: {', '.join(names)}."
    raise ConfigError(f"is no key here.{hint}", key=place + key)


def _split(name: str) -> tuple[str, str]:
    """Split the name of a field into its quantity and its unit, which is empty where it has none."""
    for base in ("bytes_per_s", "bytes", "s"):
        if name.endswith(f"_{base}"):
            return name.removesuffix(f"_{base}"), base
    return name, ""
