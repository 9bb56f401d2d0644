"""From what stages cost to what each of their layers may cost, so that another split can be predicted.

A stage's seconds are shared among its layers by their weights. Layers of which there are two copies, on the two routes
of a bidirectional placement, get the mean of both.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.simulation.costs.costs import COMPUTE_FIELDS, Costs


def costs_per_layer(costs: Costs, layers_of_stage: Sequence[range], layer_weights: Sequence[float]) -> Costs:
    """Return costs with an entry per layer, for `costs_of_parts`.

    What belongs to one placement, such as channels, is left as it is; other bytes than those of messages are dropped.
    """
    num_stages, num_layers = len(layers_of_stage), len(layer_weights)
    num_copies = np.bincount([layer for part in layers_of_stage for layer in part], minlength=num_layers)
    shared: dict[str, Any] = {}
    for name in COMPUTE_FIELDS:
        if getattr(costs, name):
            of_stages = costs.spread_out(name, num_stages, "stage")
            total = np.zeros(num_layers)
            for part, seconds in zip(layers_of_stage, of_stages, strict=True):
                total[list(part)] += seconds * _shares(part, layer_weights)
            shared[name] = tuple((total / num_copies).tolist())
    return replace(
        costs,
        **shared,
        message_bytes=_bytes_per_layer(costs, layers_of_stage, num_layers),
        optimizer_s=(0.0,),
        unshard_s=(0.0,),
        reduce_s=(0.0,),
        activation_bytes=(0,),
        weight_context_bytes=(0,),
        spreads=(),
    )


def costs_of_parts(per_layer: Costs, layers_of_stage: Sequence[range]) -> Costs:
    """Sum costs with an entry per layer over the layers of each stage, whatever the routes of its placement."""
    num_layers = max(part.stop for part in layers_of_stage)
    summed: dict[str, Any] = {}
    for name in COMPUTE_FIELDS:
        if getattr(per_layer, name):
            entries = per_layer.spread_out(name, num_layers, "layer")
            summed[name] = tuple(sum(entries[layer] for layer in part) for part in layers_of_stage)
    outputs = per_layer.spread_out("message_bytes", num_layers, "layer")
    return replace(per_layer, **summed, message_bytes=tuple(int(outputs[part[-1]]) for part in layers_of_stage))


def _shares(part: range, layer_weights: Sequence[float]) -> NDArray[np.float64]:
    weights = np.array([layer_weights[layer] for layer in part], np.float64)
    if not weights.sum():
        weights = np.ones(len(part))
    return np.asarray(weights / weights.sum())


def _bytes_per_layer(costs: Costs, layers_of_stage: Sequence[range], num_layers: int) -> tuple[int, ...]:
    """Within a stage, as many as it sends on; those of a last stage, which sends nothing, as many as it receives."""
    found, last = np.zeros(num_layers, np.int64), 0
    of_stages = costs.spread_out("message_bytes", len(layers_of_stage), "stage")
    for part, num_bytes in sorted(zip(layers_of_stage, of_stages, strict=True), key=lambda pair: pair[0].start):
        last = int(num_bytes) or last
        found[list(part)] = last
    return tuple(found.tolist())
