"""Writes costs as TOML, so that `costs_from_toml` reads the same costs back."""

from dataclasses import fields
from typing import Any

import tomlkit

from penstock.ir.action import Kind
from penstock.simulation.costs.costs import Channel, SharedCosts, Spread
from penstock.simulation.costs.file import LAYER, PER, AnyCosts, key_of
from penstock.simulation.costs.layer_costs import LayerCosts

TABLES = ("channels", "spreads")
"""Fields that are lists of tables, which tomlkit puts after all other keys, as TOML wants it."""
AFTER_SECONDS = {member.name for member in fields(SharedCosts)} | {"spreads"}


def costs_to_toml(costs: AnyCosts) -> str:
    """Return all that differs from the defaults, one key a line; lists have one entry per stage, or per layer."""
    document = tomlkit.document()
    if costs.source:
        document.add(tomlkit.comment(" ".join(costs.source.split())))
    if isinstance(costs, LayerCosts):
        document.add(PER, LAYER)
    for key, value in _plain(costs).items():
        document.add(key, value)
    return tomlkit.dumps(document)


def _plain(costs: AnyCosts | Channel | Spread) -> dict[str, Any]:
    """The fields that differ from their defaults, as plain values by key; a single entry stands for itself."""
    plain: dict[str, Any] = {}
    for member in sorted(fields(costs), key=lambda member: member.name in AFTER_SECONDS):
        value = getattr(costs, member.name)
        if value == member.default or member.name == "source":
            continue
        key = key_of(type(costs), member.name)
        if member.name in TABLES:
            plain[key] = [_plain(row) for row in value]
        elif isinstance(value, tuple):
            plain[key] = value[0] if len(value) == 1 else list(value)
        else:
            plain[key] = value.letter if isinstance(value, Kind) else value
    return plain
