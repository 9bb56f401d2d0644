"""`Costs`: how long each kind of action takes on each stage, what a message costs, and what stays in memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError

PerStage = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds and bytes. A tuple holds one entry per stage, or a single one that counts for every stage.

    A transfer takes `latency_s` plus `message_bytes` / `bandwidth_bytes_per_s`. On an exclusive channel messages follow
    one another; otherwise the channel is infinitely wide and a transfer is pure delay.
    """

    forward_s: PerStage
    backward_input_s: PerStage
    backward_weight_s: PerStage
    backward_s: PerStage
    """A whole backward."""
    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = math.inf
    message_bytes: tuple[int, ...] = (0,)
    """Bytes of a stage's output, and of its gradient."""
    is_exclusive: bool = False
    launch_s: float = 0.0
    """Host time of every instruction, on top of what it does."""
    activation_bytes: tuple[int, ...] = (0,)
    """Bytes that a forward leaves behind until its backward."""
    weight_context_bytes: tuple[int, ...] = (0,)
    """What of them remains between the input part and the weight part of a backward."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            entries = value if isinstance(value, tuple) else (value,)
            if not entries:
                raise ConfigError("is empty; give one number per stage, or one for all", key=field.name)
            for entry in entries:
                _require_cost(entry, field.name)
        if self.bandwidth_bytes_per_s == 0:
            raise ConfigError(
                "0 bytes per second never delivers; leave it out for an infinite one", key="bandwidth_bytes_per_s"
            )

    @classmethod
    def uniform(
        cls,
        *,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        backward: float | None = None,
        transfer: float = 0.0,
        **others: Any,
    ) -> "Costs":
        """The same seconds on every stage; `backward` is the sum of its parts unless given, `transfer` a pure delay."""
        whole = backward_input + backward_weight if backward is None else backward
        return cls(
            forward_s=(forward,),
            backward_input_s=(backward_input,),
            backward_weight_s=(backward_weight,),
            backward_s=(whole,),
            latency_s=transfer,
            **others,
        )

    def durations_s(self, num_stages: int) -> NDArray[np.float64]:
        """[4, num_stages] seconds by `Kind` and stage."""
        kinds = ("forward_s", "backward_s", "backward_input_s", "backward_weight_s")
        return np.array([self._per_stage(name, num_stages) for name in kinds])

    def transfer_s(self, num_stages: int) -> NDArray[np.float64]:
        """[num_stages] seconds on the wire of a message from or to each stage, without latency."""
        return np.array(self._per_stage("message_bytes", num_stages)) / self.bandwidth_bytes_per_s

    def bytes_per_stage(self, name: str, num_stages: int) -> NDArray[np.int64]:
        """[num_stages] `activation_bytes` or `weight_context_bytes`."""
        return np.array(self._per_stage(name, num_stages), np.int64)

    def _per_stage(self, name: str, num_stages: int) -> Sequence[float]:
        entries: tuple[float, ...] = getattr(self, name)
        if len(entries) == 1:
            return entries * num_stages
        if len(entries) != num_stages:
            raise ConfigError(
                f"{len(entries)} entries for {num_stages} stages; give one per stage, or one for all", key=name
            )
        return entries


def _require_cost(entry: object, field: str) -> None:
    """Refuse what is no cost: seconds and bytes are finite numbers of 0 or more, bytes are whole."""
    may_be_infinite = field == "bandwidth_bytes_per_s"
    is_number = isinstance(entry, (int, float)) and entry >= 0 and (may_be_infinite or entry != math.inf)
    if not is_number:  # NaN is not >= 0 either
        raise ConfigError(f"{entry!r} is negative or not a number; costs are finite and 0 or more", key=field)
    if field.endswith("_bytes") and entry != int(entry):  # type: ignore[call-overload]
        raise ConfigError(f"{entry!r} is not a whole number of bytes", key=field)
