"""Descriptions of devices and links, from the data file that ships with the package and names its sources."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, nearest, shortened
from penstock.simulation.costs.transformer import DataType

FILE = Path(__file__).with_name("devices.toml")

TYPE_OF_TORCH: dict[str, DataType] = {"bfloat16": "bf16", "float16": "fp16", "tf32": "tf32", "float32": "fp32"}
"""The types of matrix products that devices have a peak for, by torch's word; `tf32` is torch's for float32 in TF32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The shares of a device's figures that kernels reach, which no data sheet says."""

    multiprocessors: int
    """How many tiles of a matrix product the device computes at a time."""
    matmul_share: float
    """Of the peak of the data type, for large products whose tiles fill the device."""
    attention_share: float
    attention_backward_share: float
    memory_share: float
    """Of the memory's bandwidth, for kernels that are no products."""
    launch_s: float
    """From the end of one kernel to the start of the next, at least."""
    assumed: tuple[str, ...] = ()
    """The fields for which there is no source."""

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.name.endswith("_share")):
            if not 0 < getattr(self, name) <= 1:
                problem = f"{shortened(getattr(self, name))}; expected a share, above 0 and at most 1"
                raise ConfigError(problem, key=name)
        if self.multiprocessors < 1:
            raise ConfigError(f"{shortened(self.multiprocessors)}; expected 1 or more", key="multiprocessors")
        if not 0 <= self.launch_s < 1:
            raise ConfigError(f"{shortened(self.launch_s)}; expected seconds, such as 4e-6", key="launch_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator: what its maker says it can do at most, and what kernels reach of it."""

    name: str
    bf16_flops_per_s: float
    fp16_flops_per_s: float
    tf32_flops_per_s: float
    fp32_flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    source: str
    names_in_torch: Sequence[str] = ()
    """The names that torch.cuda.get_device_name returns for the device."""
    link_within_node: str = ""
    """The name of the link between two of them in a usual node."""
    link_between_nodes: str = ""
    """The name of the link that each of them has to other nodes."""
    assumed: tuple[str, ...] = ()
    """The fields for which there is no source."""
    kernels: Kernels | None = None
    """Needed for a roofline; `Costs.analytic` asks for one efficiency instead."""

    def flops_per_s(self, data_type: DataType) -> float:
        """Return the dense matrix FLOPs per second for numbers of a type."""
        flops_per_s: float = getattr(self, f"{data_type}_flops_per_s")
        return flops_per_s

    def peak_of(self, data_type: str) -> float:
        """Return the dense matrix FLOPs per second for a type in torch's words, such as `bfloat16`.

        Raises:
            ConfigError: if the device is not described for products of that type.
        """
        if data_type not in TYPE_OF_TORCH:
            known = ", ".join(TYPE_OF_TORCH)
            problem = f"{self.name} has no peak for products of {shortened(data_type)}; known: {known}"
            raise ConfigError(f"{problem}.{nearest(data_type, TYPE_OF_TORCH)}", key="data_type")
        return self.flops_per_s(TYPE_OF_TORCH[data_type])


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection of devices; the bandwidth is that of one direction, for one device."""

    name: str
    bandwidth_bytes_per_s: float
    source: str
    latency_s: float = 0.0
    """Seconds before the first byte of a message."""
    reached_share: float = 1.0
    """The share of the bandwidth that long messages reach."""
    assumed: tuple[str, ...] = ()
    """The fields for which there is no source."""

    @property
    def reached_bytes_per_s(self) -> float:
        """The bandwidth of long messages."""
        return self.reached_share * self.bandwidth_bytes_per_s


def tables() -> dict[str, dict[str, dict[str, Any]]]:
    """Return what the file says: the fields of each `device` and of each `link`, by name."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def device(name: str) -> Device:
    """Return a device by name. Raises: ConfigError, for an unknown name, with the nearest ones."""
    described = dict(_described("device", Device.__name__, name))
    kernels, assumed = _figures(described.pop("kernels"))
    values, assumed_of_device = _figures(described)
    values["names_in_torch"] = tuple(values["names_in_torch"])
    return Device(name=name, **values, assumed=assumed_of_device, kernels=Kernels(**kernels, assumed=assumed))


def device_of_torch(name: str) -> Device | None:
    """Return the device that `torch.cuda.get_device_name` calls so; None if it is not known."""
    devices = tables()["device"]
    return next((device(key) for key, fields in devices.items() if name in fields.get("names_in_torch", ())), None)


def link(name: str) -> Link:
    """Return a link by name. Raises: ConfigError, for an unknown name, with the nearest ones."""
    values, assumed = _figures(_described("link", Link.__name__, name))
    return Link(name=name, **values, assumed=assumed)


def _described(word: str, class_name: str, name: str) -> dict[str, Any]:
    """Return what the file says of a device or a link. Raises: ConfigError, for an unknown name."""
    descriptions = tables()[word]
    if name not in descriptions:
        known = f"known: {', '.join(descriptions)}.{_nearest(name, list(descriptions))}"
        problem = f"there is no {word} {shortened(name)}; {known} Or describe your own with {class_name}(...)"
        raise ConfigError(problem, key=word)
    return descriptions[name]


def _nearest(name: str, known: Sequence[str]) -> str:
    """Return a question with the names of the same product, such as those of an "A100", or else with similar ones."""
    text = shortened(name).lower()
    same = [key for key in known if name and (key.startswith(name.lower()) or key.partition("-")[0] in text)]
    return nearest(same[0], same) if same else nearest(name.lower(), known)


def _figures(table: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the values of a table whose figures may have a source each, and the names of those that are assumed."""
    values = {name: figure["value"] if isinstance(figure, dict) else figure for name, figure in table.items()}
    assumed = tuple(name for name, figure in table.items() if isinstance(figure, dict) and figure.get("assumed"))
    return values, assumed
