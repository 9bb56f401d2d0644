"""The costs of a transformer on a described machine: seconds from FLOPs, bytes and bandwidths, nothing measured.

Every product runs at one efficiency, the share of the device's peak that the user expects. So the result says how
schedules, splits and links compare. How fast one layer is, `roofline` estimates from the layer's own products, and a
profile measures.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError
from penstock.simulation.costs.devices import Device, Link
from penstock.simulation.costs.movement import adam_moved_bytes, ring_s
from penstock.simulation.costs.transformer import (
    OPTIMIZER_BYTES_OF_TYPE,
    LayerGroup,
    Transformer,
    embedding_of,
    head_of,
    layer_of,
)

COLLECTIVES_PER_LAYER = 2
"""Tensor-parallel reductions in the forward, and in the input gradient, of one layer (arXiv 1909.08053, section 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The devices and links of the ranks of a pipeline."""

    device: Device
    efficiency: float
    """The share of the device's peak FLOPs that training reaches: model FLOPs utilisation, often 0.3 to 0.5."""
    link: Link
    """Between neighbouring ranks of the pipeline."""
    latency_s: float = 0.0
    """Of a message; data sheets do not say it."""
    launch_s: float = 0.0
    tensor_parallel: int = 1
    """Devices that share the layers of one rank, with the activations between their products cut along the sequence."""
    tensor_link: Link | None = None
    """Between those devices; needed if there are more than one."""
    replicas: int = 1
    """Copies of the pipeline that reduce their gradients together."""
    replica_link: Link | None = None
    """Between the copies; the pipeline's unless given."""

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise ConfigError(
                f"{self.efficiency!r}; give the share of the peak that is reached, above 0 and at most 1",
                key="efficiency",
            )
        for name in ("tensor_parallel", "replicas"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{getattr(self, name)}; give 1 or more", key=name)
        if self.tensor_parallel > 1 and self.tensor_link is None:
            raise ConfigError(f"is missing; say what connects the {self.tensor_parallel} devices", key="tensor_link")


def figures(model: Transformer, machine: Machine, layers_per_stage: Sequence[int]) -> dict[str, Any]:
    """Return the fields of `Costs` for a transformer on a machine, computed from sizes and not measured.

    `layers_per_stage` are numbers of decoder layers; the embedding goes with the first stage, and the head with the
    last. Seconds are operations or bytes divided by what the device does at the machine's efficiency.

    Raises:
        ConfigError: if the layers do not add up to those of the model.
    """
    if sum(layers_per_stage) != model.num_layers or min(layers_per_stage, default=0) < 0:
        raise ConfigError(
            f"{list(layers_per_stage)} adds up to {sum(layers_per_stage)}; the model has {model.num_layers} layers",
            key="layers_per_stage",
        )
    layer = layer_of(model)
    stages = [[layer] * count for count in layers_per_stage]
    stages[0].insert(0, embedding_of(model))
    stages[-1].append(head_of(model))
    return (
        _compute_fields(model, machine, stages, layers_per_stage)
        | _byte_fields(model, machine, stages)
        | _parameter_fields(model, machine, stages)
        | {
            "latency_s": machine.latency_s,
            "launch_s": machine.launch_s,
            "bandwidth_bytes_per_s": machine.link.bandwidth_bytes_per_s,
            "is_exclusive": True,
            "source": f"{machine.device.name} at an efficiency of {machine.efficiency:g}",
        }
    )


def _compute_fields(
    model: Transformer, machine: Machine, stages: Sequence[Sequence[LayerGroup]], layers_per_stage: Sequence[int]
) -> dict[str, tuple[float, ...]]:
    flops_per_s = machine.device.flops_per_s(model.data_type) * machine.efficiency * machine.tensor_parallel
    reduction_s = 0.0
    if machine.tensor_link is not None:
        link = machine.tensor_link
        reduction_s = 2 * ring_s(model.message_bytes, machine.tensor_parallel, link.bandwidth_bytes_per_s)
    waits_s = [COLLECTIVES_PER_LAYER * count * reduction_s for count in layers_per_stage]

    def seconds(name: str, extra_s: Sequence[float]) -> tuple[float, ...]:
        return tuple(flops / flops_per_s + extra for flops, extra in zip(_totals(stages, name), extra_s, strict=True))

    return {
        "forward_s": seconds("forward_flops", waits_s),
        "backward_input_s": seconds("backward_input_flops", waits_s),
        "backward_weight_s": seconds("backward_weight_flops", [0.0] * len(stages)),
    }


def _byte_fields(
    model: Transformer, machine: Machine, stages: Sequence[Sequence[LayerGroup]]
) -> dict[str, tuple[int, ...]]:
    share = machine.tensor_parallel
    names = ("activation_bytes", "weight_context_bytes")
    bytes_of_field = {name: tuple(total // share for total in _totals(stages, name)) for name in names}
    return {"message_bytes": (model.message_bytes // share,), **bytes_of_field}


def _parameter_fields(model: Transformer, machine: Machine, stages: Sequence[Sequence[LayerGroup]]) -> dict[str, Any]:
    """The bytes that are kept per parameter, and the time in which reductions and the optimizer move them."""
    counts = [total // machine.tensor_parallel for total in _totals(stages, "num_parameters")]
    bytes_per_parameter = model.bytes_each
    state_bytes = OPTIMIZER_BYTES_OF_TYPE[model.data_type]
    has_master_copy = bytes_per_parameter == 2
    moved_bytes = adam_moved_bytes(
        bytes_per_parameter, bytes_per_parameter, state_bytes, has_master_copy=has_master_copy
    )
    bytes_per_s = (machine.replica_link or machine.link).bandwidth_bytes_per_s
    unshard_s = tuple(ring_s(bytes_per_parameter * count, machine.replicas, bytes_per_s) for count in counts)
    return {
        "parameter_bytes": tuple(bytes_per_parameter * count for count in counts),
        "gradient_bytes": tuple(bytes_per_parameter * count for count in counts),
        "optimizer_bytes": tuple(state_bytes * count for count in counts),
        "optimizer_s": tuple(moved_bytes * count / machine.device.memory_bytes_per_s for count in counts),
        "reduce_s": tuple(2 * seconds for seconds in unshard_s),
        "unshard_s": unshard_s,
        "replicas": machine.replicas,
        "replica_bandwidth_bytes_per_s": bytes_per_s,
    }


def _totals(stages: Sequence[Sequence[LayerGroup]], name: str) -> list[Any]:
    """One of the figures of each stage."""
    return [sum(getattr(part, name) for part in stage) for stage in stages]
