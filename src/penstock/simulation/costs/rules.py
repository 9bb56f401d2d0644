"""The values that a cost may have: seconds, bytes and factors are finite numbers of 0 or more, bytes are whole."""

import math
from collections.abc import Sequence

import numpy as np

from penstock.errors import ConfigError, shortened

NUMBERS = (int, float, np.integer, np.floating)
MAY_BE_INFINITE = "bandwidth_bytes_per_s"
MOST_BYTES = 2**56
"""Bytes are counted in 64 bits; this leaves room for as many slices as a step may have."""


def require_costs(entries: Sequence[object], key: str, *, may_be_empty: bool = False) -> None:
    """Refuse anything but costs, of which there is at least one, unless they may be unknown.

    Raises:
        ConfigError: with the key.
    """
    if not entries and not may_be_empty:
        raise ConfigError("is empty; give one number for each, or one for all", key=key)
    for entry in entries:
        require_cost(entry, key)


def require_cost(entry: object, key: str) -> None:
    """Refuse what is no cost; `key` says by its ending whether it is a bandwidth or a number of bytes.

    Raises:
        ConfigError: with the key.
    """
    may_be_infinite = key.endswith(MAY_BE_INFINITE)
    number = as_float(entry) if isinstance(entry, NUMBERS) else math.nan
    if not (number >= 0 and (may_be_infinite or number != math.inf)):  # NaN is not >= 0 either
        raise not_a_cost(entry, key)
    if key.endswith("_bytes"):
        if number != int(number):
            raise ConfigError(f"{shortened(entry)} is not a whole number of bytes", key=key)
        if number > MOST_BYTES:
            raise ConfigError(f"{shortened(entry)} bytes are more than {MOST_BYTES}; give fewer", key=key)
    if may_be_infinite and entry == 0:
        raise ConfigError("0 bytes per second never delivers; leave it out for an infinite one", key=key)


def require_range(entries: Sequence[float], key: str) -> None:
    """Refuse anything but a least and a most factor, which may be equal. Raises: ConfigError, with the key."""
    is_pair = len(entries) == 2
    if not is_pair or entries[0] > entries[1]:
        raise ConfigError(f"{shortened(list(entries))}; expected the least and the most, such as [0.9, 1.2]", key=key)


def not_a_cost(entry: object, key: str) -> ConfigError:
    """Return the error for what is no finite number of 0 or more."""
    is_large = isinstance(entry, int) and entry > 0
    problem = "is more than a number can hold" if is_large else "is negative or not a number"
    return ConfigError(f"{shortened(entry)} {problem}; costs are finite and 0 or more", key=key)


def as_float(entry: object) -> float:
    """Return a number as a float; one that no float can hold is refused like an infinite one."""
    try:
        return float(entry)  # type: ignore[arg-type]
    except OverflowError:
        return math.inf if entry > 0 else -math.inf  # type: ignore[operator]
