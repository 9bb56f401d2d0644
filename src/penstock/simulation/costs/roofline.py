"""Seconds from a data sheet: what a device takes for the work of layers, before anybody has run them.

A product takes its operations over the share of the peak that products reach, or its bytes over the bandwidth that
kernels reach, whichever is more. A device computes a product in tiles, one on each multiprocessor at a time:

    columns
    +----+----+----+      6 tiles on 4 multiprocessors are 2 waves: as long as 8 tiles
    | 1  | 1  | 1  |      (1 and 2 are the waves; the tiles at the edges are whole, however few
    +----+----+----+       rows and columns are left for them)
    | 1  | 2  | 2  |
    +----+----+----+

All other kernels take their bytes over the bandwidth, and each kernel takes its launch. Nothing here knows a family of
models: `layer_work` has the products. Public runs took `CALIBRATION_RANGE` times these seconds, so the costs are
`CALIBRATION` times them, and carry the range.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from penstock.errors import ConfigError, shortened
from penstock.simulation.costs.devices import TYPE_OF_TORCH, Device, Kernels, Link
from penstock.simulation.costs.layer_costs import LayerCosts
from penstock.simulation.costs.layer_work import LayerWork, PassWork, Product
from penstock.simulation.costs.movement import adam_moved_bytes, ring_s
from penstock.simulation.costs.rules import require_cost
from penstock.simulation.costs.transformer import BYTES_OF_TYPE

CALIBRATION = 1.15
"""Times the bare formula, which is between what public runs took: torchtitan's Llama on A100 and H100, of which
`bench/roofline.py` prints each. The runs that set it cannot test it."""
CALIBRATION_RANGE = (1.08, 1.31)
"""The least and the most times the bare formula that one of these runs took."""

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (64, 64, 0.65))
"""Rows and columns of a tile, and the speed of a kernel with such tiles, of the fastest; the speeds are assumed."""
TILE_START = 200
"""Steps along the inner dimension in whose time a tile is begun and written; assumed."""
LEAST_INNER = 512
"""Kernels cut the inner dimension of a product with few tiles into parts of this many steps or more; assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaExchange:
    """The copies of the pipeline that gather parameters and reduce gradients together, and what connects them."""

    replicas: int
    link: Link
    is_sharded: bool = False
    """Each stores a part of the parameters, gradients and optimizer's state, and needs its part of the sums only."""

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"{shortened(self.replicas)}; expected 1 or more", key="replicas")


def layer_costs(
    work: Sequence[LayerWork],
    device: Device,
    *,
    link: Link,
    optimizer_bytes_per_parameter: float = 8.0,
    exchange: ReplicaExchange | None = None,
) -> LayerCosts:
    """Return the seconds and bytes of layers on a device, whose neighbours in the pipeline are behind a link.

    The optimizer keeps so many bytes for each parameter that is trained: 8 for Adam's two moments in 32 bits, 12 with a
    master copy. Without an exchange, `replicas.of_replicas` makes costs of any number of replicas from the bytes.

    Raises:
        ConfigError: if there are no layers, the optimizer's bytes are no number, a layer has operations without a
            formula, or the device has no peak for the type of a product or does not say what its kernels reach.
    """
    if not work:
        raise ConfigError("is empty; give the work of one layer or more", key="work")
    require_cost(optimizer_bytes_per_parameter, "optimizer_bytes_per_parameter")
    _require_formulas(work)
    seconds_by_pass: dict[tuple[PassWork, bool], float] = {}

    def seconds(layer: LayerWork, name: str) -> float:
        # Most layers of a model are equal, so each kind of work is timed once.
        key = getattr(layer, name), name == "backward_input"
        if key not in seconds_by_pass:
            seconds_by_pass[key] = CALIBRATION * pass_s(key[0], device, is_backward=key[1])
        return seconds_by_pass[key]

    optimizer_bytes = [round(optimizer_bytes_per_parameter * layer.trainable_parameters) for layer in work]
    fields_by_name: dict[str, Any] = {name: [seconds(layer, name) for layer in work] for name in _PASSES}
    fields_by_name |= {name: [getattr(layer, name) for layer in work] for name in _BYTES}
    fields_by_name["optimizer_bytes"] = optimizer_bytes
    fields_by_name["optimizer"] = [
        _optimizer_s(layer, state, device) for layer, state in zip(work, optimizer_bytes, strict=True)
    ]
    least, most = CALIBRATION_RANGE
    return LayerCosts(
        **fields_by_name | (_exchange_fields(work, exchange) if exchange else {}),
        recompute=fields_by_name["forward"],
        latency_s=link.latency_s,
        bandwidth_bytes_per_s=link.reached_bytes_per_s,
        is_exclusive=True,
        seconds_range=(least / CALIBRATION, most / CALIBRATION),
        source=f"roofline of {device.name} x {CALIBRATION:g}",
    )


def pass_s(work: PassWork, device: Device, *, is_backward: bool = False) -> float:
    """Return the seconds of one pass by the bare formula, without `CALIBRATION`.

    Raises:
        ConfigError: if the device has no peak for the type of a product, or does not say what its kernels reach.
    """
    kernels = _kernels(device)
    products_s = math.fsum(seconds_of(product, device, is_backward=is_backward) for product in work.products)
    moved_s = work.moved_bytes / (kernels.memory_share * device.memory_bytes_per_s)
    return products_s + moved_s + work.num_kernels * kernels.launch_s


def seconds_of(product: Product, device: Device, *, is_backward: bool = False) -> float:
    """Return the seconds of a product by the bare formula; its launch is not counted.

    `is_backward` tells attention kernels of a backward, which reach less. Raises: ConfigError, as `pass_s` does.
    """
    kernels, peak = _kernels(device), device.peak_of(product.data_type)
    num_bytes = BYTES_OF_TYPE[TYPE_OF_TORCH[product.data_type]]
    if product.kernel == "attention":
        # Scores stay on the multiprocessors, and the tiles of all heads fill them; the share is that of whole kernels.
        share = kernels.attention_backward_share if is_backward else kernels.attention_share
        return product.flops / (share * peak)
    matrices = product.rows * product.inner + product.inner * product.columns + product.rows * product.columns
    moved_s = num_bytes * product.batch * matrices / (kernels.memory_share * device.memory_bytes_per_s)
    flops_per_s = kernels.matmul_share * peak / kernels.multiprocessors
    computed_s = product.computed_share * _tiles_flops(product, kernels.multiprocessors) / flops_per_s
    return max(computed_s, moved_s)


def range_s(seconds: float, seconds_range: tuple[float, ...]) -> tuple[float, float]:
    """Return the least and the most seconds that a run may take, by the range that costs carry."""
    return seconds * seconds_range[0], seconds * seconds_range[1]


def _tiles_flops(product: Product, multiprocessors: int) -> float:
    """Return the operations of the busiest multiprocessor, with the tiles and cuts that libraries would choose."""
    candidates = []
    for rows, columns, speed in TILES:
        tiles = math.ceil(product.rows / rows) * math.ceil(product.columns / columns) * product.batch
        cuts = 1
        while cuts == 1 or (product.inner >= cuts * LEAST_INNER and tiles * cuts < 2 * multiprocessors):
            waves = math.ceil(tiles * cuts / multiprocessors)
            candidates.append(waves * 2.0 * rows * columns * (product.inner / cuts + TILE_START) / speed)
            cuts *= 2
    return min(candidates)


def _optimizer_s(layer: LayerWork, state_bytes: int, device: Device) -> float:
    """Return the seconds of the optimizer's step for the parameters of a layer that are trained."""
    share = layer.trainable_parameters / layer.num_parameters if layer.num_parameters else 0.0
    parameter_bytes = share * layer.parameter_bytes
    moved_bytes = adam_moved_bytes(parameter_bytes, layer.gradient_bytes, state_bytes, has_master_copy=False)
    return moved_bytes / (_kernels(device).memory_share * device.memory_bytes_per_s)


def _exchange_fields(work: Sequence[LayerWork], exchange: ReplicaExchange) -> dict[str, Any]:
    """Return the fields of costs that say what gathers and reductions over replicas take."""
    members, bytes_per_s, latency_s = exchange.replicas, exchange.link.reached_bytes_per_s, exchange.link.latency_s
    times = 1 if exchange.is_sharded else 2
    return {
        "unshard": [ring_s(layer.parameter_bytes, members, bytes_per_s, latency_s) for layer in work],
        "reduce": [times * ring_s(layer.gradient_bytes, members, bytes_per_s, latency_s) for layer in work],
        "replicas": members,
        "shards": members if exchange.is_sharded else 1,
        "replica_latency_s": latency_s,
        "replica_bandwidth_bytes_per_s": bytes_per_s,
    }


def _kernels(device: Device) -> Kernels:
    if device.kernels is None:
        problem = f"{device.name} does not say what its kernels reach"
        raise ConfigError(f"{problem}; describe it with Device(..., kernels=Kernels(...))", key="device")
    return device.kernels


def _require_formulas(work: Sequence[LayerWork]) -> None:
    """Refuse layers with operations whose work nobody has counted. Raises: ConfigError, with their names."""
    layers_by_operation: dict[str, list[str]] = {}
    for layer in work:
        for layer_pass in (layer.forward, layer.backward_input, layer.backward_weight):
            for operation in layer_pass.unknown:
                layers_by_operation.setdefault(operation, []).append(layer.name)
    if layers_by_operation:
        named = ", ".join(
            f"{operation} (layer {shortened(names[0])})" for operation, names in sorted(layers_by_operation.items())
        )
        raise ConfigError(
            f"there is no formula for {named}; measure the layers with `penstock profile`, and give its costs",
            key="work",
        )


_PASSES = ("forward", "backward_input", "backward_weight")
_SIZES_OF_COSTS = {field.name for field in fields(LayerCosts) if field.name.endswith("_bytes")}
_BYTES = tuple(field.name for field in fields(LayerWork) if field.name in _SIZES_OF_COSTS)
"""The sizes of a layer that costs have too."""
