"""Descriptions of devices and links, from the data file that ships with the package and names its sources."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from penstock.errors import ConfigError, nearest
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

    def flops_per_s(self, data_type: DataType) -> float:
        """Return the dense matrix FLOPs per second for numbers of a type."""
        flops_per_s: float = getattr(self, f"{data_type}_flops_per_s")
        return flops_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What connects devices; the bandwidth is that of one direction, for one device."""

    name: str
    bandwidth_bytes_per_s: float
    source: str


Found = TypeVar("Found", Device, Link)


@cache
def devices() -> Mapping[str, Device]:
    """Return the devices that are described, by name."""
    return MappingProxyType({name: Device(name=name, **row) for name, row in _tables()["device"].items()})


@cache
def links() -> Mapping[str, Link]:
    """Return the links that are described, by name."""
    return MappingProxyType({name: Link(name=name, **row) for name, row in _tables()["link"].items()})


def device(name: str) -> Device:
    """Return a device by name.

    Raises:
        ConfigError: for an unknown name, with the nearest ones.
    """
    return _find(name, devices(), "device")


def link(name: str) -> Link:
    """Return a link by name.

    Raises:
        ConfigError: for an unknown name, with the nearest ones.
    """
    return _find(name, links(), "link")


def _tables() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def _find(name: str, known: Mapping[str, Found], word: str) -> Found:
    if name not in known:
        names = ", ".join(known)
        raise ConfigError(
            f"there is no {word} {name!r}; known: {names}.{nearest(name, known)} Or describe your own with "
            f"{word.capitalize()}(...)",
            key=word,
        )
    return known[name]
