"""Clusters of devices by name: what a rank may hold, and which links a device usually has."""

from penstock.errors import ConfigError
from penstock.ir.units import format_bytes
from penstock.searching.layouts.cluster import Cluster, Wire
from penstock.simulation.costs.devices import Link
from penstock.simulation.costs.devices import device as device_of
from penstock.simulation.costs.devices import link as link_of

RESERVE_BYTES = 2_500_000_000
"""Bytes of a GPU that are no tensors: its context, buffers of collectives, fragments. Assumed."""
LINKS = {
    "a100-sxm-40gb": ("nvlink-3", "infiniband-hdr"),
    "a100-sxm-80gb": ("nvlink-3", "infiniband-hdr"),
    "h100-sxm": ("nvlink-4", "infiniband-ndr"),
    "h200-sxm": ("nvlink-4", "infiniband-ndr"),
    "b200-sxm": ("nvlink-5", "infiniband-ndr"),
    "l40s": ("pcie-4-x16", "roce-200g"),
    "rtx-4090": ("pcie-4-x16", "roce-100g"),
    "mi300x": ("infinity-fabric-mi300x", "infiniband-ndr"),
}
"""The links within and between nodes, one port for each device, with which makers sell nodes of a device."""


def cluster_of(gpus: int, nodes: int, device: str | None, memory_bytes: int | None) -> Cluster:
    """Return a cluster of devices of a name; without one, of ranks that may hold all of `memory_bytes`.

    Raises:
        ConfigError: an unknown device, more memory than it has, or numbers that do not divide.
    """
    if device is None:
        if memory_bytes is None:
            raise ConfigError("neither a device nor a memory is given; name the device, as h100-sxm", key="device")
        return Cluster(gpus=gpus, nodes=nodes, memory_bytes=memory_bytes)
    described = device_of(device)
    if memory_bytes is not None and memory_bytes > described.memory_bytes:
        raise ConfigError(
            f"{format_bytes(memory_bytes)} is more than the {format_bytes(described.memory_bytes)} of {device}; give "
            "less, or leave it out",
            key="memory",
        )
    device_bytes = memory_bytes or described.memory_bytes
    if device_bytes <= RESERVE_BYTES:
        raise ConfigError(
            f"{format_bytes(device_bytes)} leaves nothing beside the {format_bytes(RESERVE_BYTES)} that are no "
            "tensors; give more",
            key="memory",
        )
    within, between = map(_wire, LINKS[device])
    return Cluster(
        gpus=gpus,
        nodes=nodes,
        memory_bytes=device_bytes,
        reserve_bytes=RESERVE_BYTES,
        within=within,
        between=between,
    )


def link_within(device: str) -> Link:
    """Return the link between devices of one node. Raises: ConfigError, for an unknown device."""
    return link_of(LINKS[device_of(device).name][0])


def _wire(name: str) -> Wire:
    link = link_of(name)
    return Wire(latency_s=link.latency_s, bandwidth_bytes_per_s=link.reached_bytes_per_s)
