"""Descriptions of devices and links, from the data file that ships with the package and names its sources."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import ConfigError, nearest, shortened
from penstock.simulation.costs.transformer import DataType

FILE = Path(__file__).with_name("devices.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator: what its maker says it can do at most."""

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

    def flops_per_s(self, data_type: DataType) -> float:
        """Return the dense matrix FLOPs per second for numbers of a type."""
        flops_per_s: float = getattr(self, f"{data_type}_flops_per_s")
        return flops_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection of devices; the bandwidth is that of one direction, for one device."""

    name: str
    bandwidth_bytes_per_s: float
    source: str


Described = TypeVar("Described", Device, Link)


def tables() -> dict[str, dict[str, dict[str, Any]]]:
    """Return what the file says: the fields of each `device` and of each `link`, by name."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def device(name: str) -> Device:
    """Return a device by name. Raises: ConfigError, for an unknown name, with the nearest ones."""
    return _make(Device, name)


def device_of_torch(name: str) -> Device | None:
    """Return the device that `torch.cuda.get_device_name` calls so; None if it is not known."""
    devices = tables()["device"]
    return next((device(key) for key, fields in devices.items() if name in fields.get("names_in_torch", ())), None)


def link(name: str) -> Link:
    """Return a link by name. Raises: ConfigError, for an unknown name, with the nearest ones."""
    return _make(Link, name)


def _make(kind: type[Described], name: str) -> Described:
    word = kind.__name__.lower()
    descriptions = tables()[word]
    if name not in descriptions:
        names = ", ".join(descriptions)
        raise ConfigError(
            f"there is no {word} {shortened(name)}; known: {names}.{nearest(name, descriptions)} Or describe your own "
            f"with {kind.__name__}(...)",
            key=word,
        )
    return kind(name=name, **descriptions[name])
