"""Costs in a short text, as on a command line: `F=1,I=1,W=1,B=2,transfer=0.1`, in seconds.

F, I, W and B are those of one action of one stage (and slice), the same on every stage. B, the whole backward, is I + W
unless given; without I and W, schedules that split backwards have no costs. R, a forward that runs again, takes F
unless given. `transfer` is a delay between different ranks, 0 unless given. Two actions that overlap take `overlap`
times their sum, 1 unless given. `unshard` gathers the weights of a stage, and `reduce` reduces its gradients over the
replicas; both are 0 unless given.
"""

import math
from typing import Any

from penstock.errors import ConfigError, nearest, shortened
from penstock.ir.operations import Kind
from penstock.simulation.costs.costs import FIELD_OF_KIND, FIELD_OF_OP, Costs

FIELD_OF_KEY = {
    **{kind.letter: FIELD_OF_KIND[kind] for kind in Kind},
    "transfer": "latency_s",
    "overlap": "overlap_factor",
    "unshard": "unshard_s",
    "reduce": "reduce_s",
}
_OF_STAGES = {*FIELD_OF_KIND.values(), *FIELD_OF_OP.values()}
EXAMPLE = "F=1,I=1,W=1,transfer=0.1"


def costs_from_text(text: str) -> Costs:
    """Read costs that are the same on every stage.

    Raises:
        ConfigError: for a key that is unknown, missing or given twice, and a value that is no finite number of 0 or
            more.
    """
    values: dict[str, float] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise ConfigError(
                f"{shortened(part)} is not of the form key=value; expected such as {EXAMPLE}", key="costs"
            )
        if key not in FIELD_OF_KEY:
            known = ", ".join(FIELD_OF_KEY)
            close = nearest(key.upper() if len(key) == 1 else key, FIELD_OF_KEY)
            raise ConfigError(f"there is no cost {shortened(key)}; known: {known}.{close}", key="costs")
        if key in values:
            raise ConfigError(f"{key} is given twice; keep one", key="costs")
        values[key] = _read_value(key, value)
    needed = ("F",) if "B" in values and not {"I", "W"} & set(values) else ("F", "I", "W")
    missing = [key for key in needed if key not in values]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} missing; give F, and I and W or at least B, such as {EXAMPLE}", key="costs"
        )
    fields: dict[str, Any] = {
        FIELD_OF_KEY[key]: (value,) if FIELD_OF_KEY[key] in _OF_STAGES else value for key, value in values.items()
    }
    return Costs(**fields)


def _read_value(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:  # NaN is neither
        raise ConfigError(f"{key} is {shortened(text)}; give a finite number of 0 or more", key="costs")
    return value
