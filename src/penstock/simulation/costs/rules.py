"""What a cost may be: seconds, bytes and factors are finite numbers of 0 or more, bytes are whole."""

import math

import numpy as np

from penstock.errors import ConfigError, described

NUMBERS = (int, float, np.integer, np.floating)
MAY_BE_INFINITE = "bandwidth_bytes_per_s"


def require_costs(entries: object, key: str, *, may_be_empty: bool = False) -> None:
    """Refuse anything but a tuple of costs that holds at least one, unless they may be unknown.

    Raises:
        ConfigError: with the key.
    """
    if not isinstance(entries, tuple):
        raise ConfigError(f"{described(entries)}; give a tuple: one number for each, or (x,) for all", key=key)
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
    is_number = isinstance(entry, NUMBERS) and entry >= 0 and (may_be_infinite or entry != math.inf)
    if not is_number:  # NaN is not >= 0 either
        raise ConfigError(f"{entry!r} is negative or not a number; costs are finite and 0 or more", key=key)
    if key.endswith("_bytes") and entry != int(entry):  # type: ignore[call-overload]
        raise ConfigError(f"{entry!r} is not a whole number of bytes", key=key)
    if may_be_infinite and entry == 0:
        raise ConfigError("0 bytes per second never delivers; leave it out for an infinite one", key=key)
