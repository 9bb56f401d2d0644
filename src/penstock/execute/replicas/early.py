"""Shards each layer as soon as it is built, so that a rank never holds more than its shards and one whole layer.

    build       a layer, on every replica
    compare     its parameters, and whether any replica has failed
    share       the first replica's values
    keep        this replica's rows; the parameter is left with its shape and no memory

A layer that is given as a module, or whose builder may share something with another one, is sharded later, once it is
known which parameters are one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.errors import ConfigError, PenstockError
from penstock.execute.control.agreement import digest
from penstock.execute.control.collectives import Control
from penstock.execute.replicas.first_replica import share_all
from penstock.execute.replicas.rows import Rows

OWN_ROWS = "rows_of_this_replica"
"""Attribute of a parameter whose memory was freed: (its `Rows`, this replica's part)."""


class EarlyShards:
    """Shards the layers of one rank while they are built; all replicas build the same ones, in one order."""

    def __init__(self, control: Control, device: torch.device) -> None:
        self._control = control
        self._device = device

    def agree(self, name: str, built: nn.Module | PenstockError, *, is_separate: bool) -> nn.Module:
        """Return a layer that all replicas have built alike, on its device; sharded if it shares nothing with others.

        Raises:
            PenstockError: on every replica, if one has failed or they differ.
        """
        local_report = _report(built, is_separate=is_separate)
        reports = self._control.across(local_report)
        if isinstance(built, PenstockError):
            raise built
        names = [self._control.names[index] for index in self._control.places.across]
        for rank, report in zip(names, reports, strict=True):
            if report["failure"]:
                raise ConfigError(f"{rank}: {report['failure']}")
            if report["holds"] != reports[0]["holds"]:
                raise ConfigError(
                    f"layer {name!r} holds other parameters or buffers on {rank} than on {names[0]}, in name, shape or "
                    "type; let all replicas build the same layers",
                    key="layers",
                )
        if all(report["is_separate"] for report in reports):
            built.to(self._device)
            self._shard([parameter for parameter in built.parameters() if early_rows(parameter) is None])
        return built

    def _shard(self, parameters: Sequence[nn.Parameter]) -> None:
        data, places = self._control.places.data, self._control.places
        if data is not None:
            share_all(data, parameters)
        for parameter in parameters:
            rows = Rows.of(parameter, places.num_replicas)
            part = parameter.detach().new_zeros(rows.part_elements)
            rows.take_own(parameter.detach(), part, places.replica)
            setattr(parameter, OWN_ROWS, (rows, part))
            parameter.data = parameter.detach().new_empty(()).expand(parameter.shape)


def early_rows(parameter: Tensor) -> tuple[Rows, Tensor] | None:
    """Return the `Rows` and this replica's part of a parameter that was sharded when it was built; None for others."""
    remainder: tuple[Rows, Tensor] | None = getattr(parameter, OWN_ROWS, None)
    return remainder


def _report(built: nn.Module | PenstockError, *, is_separate: bool) -> dict[str, object]:
    if isinstance(built, PenstockError):
        return {"failure": str(built), "holds": 0, "is_separate": False}
    named_tensors = [*built.named_parameters(), *built.named_buffers()]
    is_separate = is_separate and not any(
        is_lazy(tensor) for _, tensor in named_tensors
    )  # refused later, with the others
    holds = [
        f"{name} {'' if is_lazy(tensor) else tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named_tensors
    ]
    return {"failure": "", "holds": digest("; ".join(holds)), "is_separate": is_separate}
