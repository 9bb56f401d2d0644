"""From costs per layer to costs per stage: what a split of the model costs."""

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import accumulate, pairwise
from typing import Any

from penstock.errors import ConfigError
from penstock.simulation.costs.costs import Costs

NOT_PER_STAGE = (
    "tied_reduce_s",
    "microbatch_compute_factor",
    "microbatch_bytes_factor",
    "message_bytes",
    "channels",
    "spreads",
)


def costs_of_split(per_layer: Costs, layers_per_stage: Sequence[int]) -> Costs:
    """Sum costs that have an entry per layer (or one for all) into one entry per stage.

    A stage's output is that of its last layer. Spreads are left out: they do not add up.

    Raises:
        ConfigError: if the layers of the stages are not as many as the costs have, or a stage has none.
    """
    if not layers_per_stage or min(layers_per_stage) < 1:
        raise ConfigError(f"{list(layers_per_stage)}; give every stage a layer or more", key="layers_per_stage")
    num_layers = sum(layers_per_stage)
    bounds = list(pairwise(accumulate(layers_per_stage, initial=0)))
    summed: dict[str, Any] = {}
    for name in _per_stage_fields(per_layer):
        entries = per_layer.spread_out(name, num_layers, "layer")
        summed[name] = tuple(sum(entries[first:end]) for first, end in bounds)
    outputs = per_layer.spread_out("message_bytes", num_layers, "layer")
    summed["message_bytes"] = tuple(outputs[end - 1] for _, end in bounds)
    return replace(per_layer, **summed, spreads=())


def _per_stage_fields(costs: Costs) -> list[str]:
    """The fields that add up over layers and are known."""
    tuples = [member.name for member in fields(costs) if isinstance(getattr(costs, member.name), tuple)]
    return [name for name in tuples if name not in NOT_PER_STAGE and getattr(costs, name)]
