"""Writes costs as TOML, so that `costs_from_toml` reads the same costs back."""

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from penstock.ir.action import Kind
from penstock.simulation.costs.costs import Channel, SharedCosts, Spread
from penstock.simulation.costs.file import LAYER, PER, AnyCosts, key_of
from penstock.simulation.costs.layer_costs import LayerCosts

AFTER_SECONDS = {member.name for member in fields(SharedCosts)} | {"spreads"}


def costs_to_toml(costs: AnyCosts) -> str:
    """Return all that differs from the defaults, one key a line; lists have one entry per stage, or per layer."""
    return "".join(f"{line}\n" for line in _toml_lines(costs))


def _toml_lines(costs: AnyCosts) -> Iterator[str]:
    tables: dict[str, list[dict[str, Any]]] = {}
    if costs.source:
        yield f"# {' '.join(costs.source.split())}"
    if isinstance(costs, LayerCosts):
        yield f'{PER} = "{LAYER}"'
    for key, value in _plain(costs).items():
        if key in ("channels", "spreads"):
            tables[key] = value
        else:
            yield f"{key} = {_toml(value)}"
    for key, rows in tables.items():
        for row in rows:
            yield ""
            yield f"[[{key}]]"
            yield from (f"{name} = {_toml(value)}" for name, value in row.items())


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_toml(entry) for entry in value)}]"
    # Numbers, true, false and the letters of kinds are written alike in both.
    return json.dumps(value)


def _plain(costs: AnyCosts | Channel | Spread) -> dict[str, Any]:
    """The fields that differ from their defaults, as plain values by key; a single entry stands for itself."""
    plain: dict[str, Any] = {}
    for member in sorted(fields(costs), key=lambda member: member.name in AFTER_SECONDS):
        value = getattr(costs, member.name)
        if value == member.default or member.name == "source":
            continue
        key = key_of(type(costs), member.name)
        if member.name in ("channels", "spreads"):
            plain[key] = [_plain(row) for row in value]
        elif isinstance(value, tuple):
            plain[key] = value[0] if len(value) == 1 else list(value)
        else:
            plain[key] = value.letter if isinstance(value, Kind) else value
    return plain
