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
"""Attribute of a parameter that has no memory any more: (its `Rows`, this replica's part)."""


class EarlyShards:
    """Shards the layers of one rank while they are built; all replicas build the same ones, in one order."""

    def __init__(self, control: Control, device: torch.device) -> None:
        self._control = control
        self._device = device

    def agree(self, name: str, built: nn.Module | PenstockError, *, is_apart: bool) -> nn.Module:
        """Return a layer that all replicas have built alike; on its device and sharded, if it `is_apart` from others.

        Raises:
            PenstockError: on every replica, if one has failed or they differ.
        """
        own = _report(built, is_apart=is_apart)
        everyone = self._control.across(own)
        if isinstance(built, PenstockError):
            raise built
        names = [self._control.names[index] for index in self._control.places.across]
        for rank, theirs in zip(names, everyone, strict=True):
            if theirs["failure"]:
                raise ConfigError(f"{rank}: {theirs['failure']}")
            if theirs["holds"] != everyone[0]["holds"]:
                raise ConfigError(
                    f"layer {name!r} holds other parameters or buffers on {rank} than on {names[0]}, in name, shape or "
                    "type; let all replicas build the same layers",
                    key="layers",
                )
        if all(theirs["is_apart"] for theirs in everyone):
            built.to(self._device)
            self._shard([each for each in built.parameters() if early_rows(each) is None])
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
    """Return what is left of a parameter that was sharded when it was built: its rows, and this replica's part."""
    found: tuple[Rows, Tensor] | None = getattr(parameter, OWN_ROWS, None)
    return found


def _report(built: nn.Module | PenstockError, *, is_apart: bool) -> dict[str, object]:
    if isinstance(built, PenstockError):
        return {"failure": str(built), "holds": 0, "is_apart": False}
    named = [*built.named_parameters(), *built.named_buffers()]
    is_apart = is_apart and not any(is_lazy(each) for _, each in named)  # refused later, with the others
    holds = [f"{name} {'' if is_lazy(each) else tuple(each.shape)} {each.dtype}" for name, each in named]
    return {"failure": "", "holds": digest("; ".join(holds)), "is_apart": is_apart}
