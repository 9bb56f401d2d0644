"""Costs of which some ranks, stages or layers take longer than the others: a head, an embedding, a slower device."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from penstock.simulation.costs.costs import COMPUTE_FIELDS, Costs
from penstock.simulation.costs.layer_costs import LayerCosts

AnyCosts = TypeVar("AnyCosts", Costs, LayerCosts)


def with_heavy_entries(costs: AnyCosts, factors: Mapping[int, float], num_entries: int, noun: str) -> AnyCosts:
    """Return costs whose computations take so many times as long, by the index of their entry.

    A cost with one entry for all gets `num_entries`, which are ranks, stages or layers, as the `noun` says.

    Raises:
        ConfigError: a cost has several entries, but another number of them.
    """
    names = [name.removesuffix("_s") if isinstance(costs, LayerCosts) else name for name in COMPUTE_FIELDS]
    multipliers = [factors.get(index, 1.0) for index in range(num_entries)]
    changed = {}
    for name in names:
        entries = getattr(costs, name)
        if entries:
            spread = costs.spread_out(name, num_entries, noun)
            changed[name] = tuple(factor * entry for factor, entry in zip(multipliers, spread, strict=True))
    return replace(costs, **changed)  # type: ignore[arg-type]
