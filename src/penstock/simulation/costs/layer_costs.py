"""`LayerCosts`: costs per layer of a model, which add up to those of stages for any split of it.

layer         0      1      2      3      4
forward     1.0    4.0    4.0    4.0    6.0
            |_________________|  |________|
stage                0                1
forward_s           9.0             10.0         of_stages([3, 2])
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, described, shortened
from penstock.ir.action import Kind
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.simulation.costs.costs import COMPUTE_FIELDS, WORKSPACE_BYTES, Costs, PerStage, SharedCosts

PerLayer = PerStage
"""One entry per layer, or a single one that counts for every layer."""

SECONDS = (*(name.removesuffix("_s") for name in COMPUTE_FIELDS), "optimizer", "unshard", "reduce")
"""Fields that are `<name>_s` of `Costs`, and add up over the layers of a stage."""
SUMMED_BYTES = ("activation_bytes", "weight_context_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes")
"""Fields in bytes that add up over the layers of a stage. Of workspaces, which layers take one after another, a stage
has the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts(SharedCosts):
    """Seconds and bytes per layer, of one microbatch; what is not given has none.

    A list, an array or one number for all layers will do wherever there is an entry per layer.
    """

    split: tuple[int, ...] = ()
    """Layers of each stage in the run that was measured; empty where none was."""
    forward: PerLayer = ()
    backward_input: PerLayer = ()
    backward_weight: PerLayer = ()
    backward: PerLayer = ()
    split_forward: PerLayer = ()
    recompute: PerLayer = ()
    optimizer: PerLayer = ()
    unshard: PerLayer = ()
    reduce: PerLayer = ()
    weight_context_bytes: tuple[int, ...] = ()
    """Bytes kept between the two parts of a split backward; as many as `activation_bytes` unless given."""

    def __post_init__(self) -> None:
        SharedCosts.__post_init__(self)
        if self.split:
            self._require_split()

    @property
    def num_layers(self) -> int:
        """The number of layers of the model.

        Raises:
            ConfigError: if no field has more than one entry, which is then the same for any number of layers, and no
                split says how many there are.
        """
        num_layers = max(sum(self.split), *(len(getattr(self, name)) for name in _PER_LAYER))
        if num_layers < 2 and not self.split:
            raise self.error("one number for all layers does not say how many there are; give one per layer", "forward")
        return num_layers

    @property
    def seconds_of_layers(self) -> NDArray[np.float64]:
        """[2, num_layers] what a forward and a backward of each layer take; their sum balances layers over stages."""
        count = self.num_layers
        table = self.of_stages([1] * count).durations_s(count)
        return np.nan_to_num(table[[Kind.FORWARD, Kind.BACKWARD]])

    def of_stages(self, split: Sequence[int | range]) -> Costs:
        """Return the costs of stages, from the number of layers of each stage or from its range of layers.

            costs.of_stages([3, 2])                                      layers 0 to 2, and 3 to 4
            costs.of_stages([range(3), range(3, 5), range(3), range(3, 5)])     two copies of the model

        Seconds and bytes of a stage are the sum of its layers', but its workspaces are the largest of its layers'. Its
        message is what its last layer makes, and its checkpoint (what it keeps to run again) is what its first layer
        takes.

        Raises:
            ConfigError: if a stage has no layers, or the stages have others than the costs.
        """
        layers_of_stage = _layers_of_stages(split)
        num_layers = max(layers.stop for layers in layers_of_stage)

        def entries_for(name: str) -> Sequence[float]:
            return self.spread_out(name, num_layers, "layer") if getattr(self, name) else ()

        costs_by_field: dict[str, Any] = {name: getattr(self, name) for name in _FIELDS_NOT_PER_LAYER}
        entries_by_field = {f"{name}_s": entries_for(name) for name in SECONDS} | {
            name: entries_for(name) for name in SUMMED_BYTES
        }
        entries_by_field["weight_context_bytes"] = (
            entries_by_field["weight_context_bytes"] or entries_by_field["activation_bytes"]
        )
        for name, entries in entries_by_field.items():
            if entries:
                costs_by_field[name] = tuple(sum(entries[layer] for layer in layers) for layers in layers_of_stage)
        for name in WORKSPACE_BYTES:
            entries = entries_for(name)
            costs_by_field[name] = tuple(max(entries[layer] for layer in layers) for layers in layers_of_stage)
        outputs, inputs = entries_for("message_bytes"), entries_for("checkpoint_bytes")
        costs_by_field["message_bytes"] = tuple(outputs[layers[-1]] for layers in layers_of_stage)
        costs_by_field["checkpoint_bytes"] = tuple(inputs[layers[0]] for layers in layers_of_stage) if inputs else ()
        return Costs(**costs_by_field)

    def of_table(self, table: Schedule | Program, split: Sequence[range]) -> Costs:
        """Return what the stages of a schedule or program cost that have these layers.

        A slice takes its share of a microbatch. Of the channels that differ, those count whose ranks there are.
        """
        ranks = range(table.num_ranks)
        channels = tuple(channel for channel in self.channels if channel.sender in ranks and channel.receiver in ranks)
        return replace(self.of_stages(split), channels=channels).of_share(1 / table.num_slices)

    @classmethod
    def from_stages(
        cls,
        costs: Costs,
        layers_of_stage: Sequence[range],
        weights: Sequence[float],
        backward_weights: Sequence[float] | None = None,
    ) -> "LayerCosts":
        """Share the seconds of each stage among its layers by their weights, so that other splits can be predicted.

        `weights` are the relative costs of the layers, and `backward_weights` those of backwards, if they differ. Where
        two routes hold copies of a layer, as in a bidirectional placement, the layer gets the mean of both. The result
        remembers how many layers each stage had. It has no bytes but those of messages, and no seconds of collectives
        and the optimizer, since these do not follow the same weights.
        """
        num_layers = len(weights)
        weights_of_backwards = weights if backward_weights is None else backward_weights
        num_copies = np.bincount([layer for layers in layers_of_stage for layer in layers], minlength=num_layers)
        costs_by_field: dict[str, Any] = {name: getattr(costs, name) for name in _FIELDS_NOT_PER_LAYER}
        for name in COMPUTE_FIELDS:
            if getattr(costs, name):
                seconds_of_stage = costs.spread_out(name, len(layers_of_stage), "stage")
                weight_of_layer = weights_of_backwards if name.startswith("backward") else weights
                seconds_of_layer = np.zeros(num_layers)
                for layers, seconds in zip(layers_of_stage, seconds_of_stage, strict=True):
                    seconds_of_layer[list(layers)] += seconds * _shares([weight_of_layer[layer] for layer in layers])
                costs_by_field[name.removesuffix("_s")] = seconds_of_layer / num_copies
        return cls(
            **costs_by_field,
            message_bytes=_outputs_of_layers(costs, layers_of_stage, num_layers),
            split=split_sizes(layers_of_stage),
        )

    def _require_split(self) -> None:
        """Refuse a split that is not of these layers. Raises: ConfigError."""
        if not all(isinstance(count, int) and count > 0 for count in self.split):
            problem = f"{shortened(list(self.split))}; expected layers per stage, 1 or more each, such as [3, 2]"
            raise self.error(problem, "split")
        num_layers, total = max(len(getattr(self, name)) for name in _PER_LAYER), sum(self.split)
        if num_layers > 1 and total != num_layers:
            problem = (
                f"{shortened(list(self.split))} adds up to {shortened(total)} layers, but the costs have {num_layers}"
            )
            raise self.error(f"{problem}; make it add up to {num_layers}, or leave it out", "split")


def split_sizes(layers_of_stage: Sequence[range]) -> tuple[int, ...]:
    """Return the number of layers of each stage along a route; stages with copies of the same layers count once."""
    return tuple(len(part) for part in sorted(set(layers_of_stage), key=lambda part: part.start))


_PER_LAYER = (*SECONDS, *SUMMED_BYTES, *WORKSPACE_BYTES, "message_bytes", "checkpoint_bytes")
_FIELDS_NOT_PER_LAYER = tuple(cost.name for cost in fields(SharedCosts) if cost.name not in _PER_LAYER)


def _layers_of_stages(split: Sequence[int | range]) -> list[range]:
    """Return the layers of each stage, from their ranges or counts. Raises: ConfigError."""
    plain = split.tolist() if isinstance(split, np.ndarray) else split
    is_list = isinstance(plain, Sequence) and not isinstance(plain, str)
    if not is_list or not all(isinstance(part, int | np.integer | range) for part in plain):
        raise ConfigError(f"{described(split)}; expected layers per stage, such as [3, 2]", key="split")
    sizes = [len(part) if isinstance(part, range) else int(part) for part in plain]
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"{shortened(list(split))}; give every stage a layer or more", key="split")
    bounds = pairwise(accumulate(sizes, initial=0))
    parts = [part if isinstance(part, range) else range(*bound) for part, bound in zip(split, bounds, strict=True)]
    layers_with_stage = {layer for part in parts for layer in part}
    missing = set(range(max(layers_with_stage))) - layers_with_stage
    if missing:
        raise ConfigError(
            f"{shortened(list(split))}; no stage has layer {min(missing)}, give every layer to one", key="split"
        )
    return parts


def _shares(weights: Sequence[float]) -> Any:
    """Return weights as shares of their sum; equal shares where all are 0."""
    column = np.array(weights, np.float64)
    if not column.sum():
        column = np.ones(len(column))
    return column / column.sum()


def _outputs_of_layers(costs: Costs, layers_of_stage: Sequence[range], num_layers: int) -> tuple[int, ...]:
    """[num_layers] bytes of each layer's output: as many as its stage sends on.

    A last stage sends nothing; its layers get as many as it receives.
    """
    bytes_of_layer, last_bytes = np.zeros(num_layers, np.int64), 0
    bytes_of_stage = costs.spread_out("message_bytes", len(layers_of_stage), "stage")
    for layers, num_bytes in sorted(zip(layers_of_stage, bytes_of_stage, strict=True), key=lambda pair: pair[0].start):
        last_bytes = int(num_bytes) or last_bytes
        bytes_of_layer[list(layers)] = last_bytes
    return tuple(bytes_of_layer.tolist())
