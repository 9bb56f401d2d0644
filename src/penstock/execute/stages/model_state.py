"""The state of the model by the unsplit model's names: of one rank's layers, or of all, gathered on one rank.

    gather     root <-- first tensor of rank 1, first of rank 2, ... <-- second of rank 1, ...
    scatter    root --> first tensor of rank 1, first of rank 2, ... --> second of rank 1, ...

Taking turns keeps every wait of a rank short, however much there is in all.
Guarantees: nothing is changed before every rank has found the state right. Relies on: no step runs meanwhile.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from penstock.errors import ConfigError, listed, nearest
from penstock.execute.control.collectives import Control
from penstock.execute.stages.names import full_name, part_of_state
from penstock.execute.stages.stage import Stage
from penstock.execute.transport.protocol import Transport

KEY = "state_dict"
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Entry(NamedTuple):
    """One tensor of a rank's state."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def own_state(stages: Sequence[Stage]) -> dict[str, Any]:
    """Return the parameters and saved buffers of a rank's layers, as `torch.nn.Module.state_dict` has them."""
    return {
        full_name(layer, module, name): value
        for stage in sorted(stages, key=lambda stage: stage.first_layer)
        for layer, module in stage.layers.items()
        for name, value in module.state_dict().items()
    }


def entries_of_ranks(transport: Transport, own: Mapping[str, Any]) -> list[list[Entry]]:
    """Return, per rank, the tensors of its state; every rank calls it."""
    tensors = {name: value for name, value in own.items() if isinstance(value, Tensor)}
    mine = [[name, str(value.dtype), [*value.shape]] for name, value in tensors.items()]
    everyone: list[Any] = Control(transport).all_gather_object(mine)
    return [[Entry(name, _DTYPES[dtype], tuple(shape)) for name, dtype, shape in theirs] for theirs in everyone]


def gather_state(
    transport: Transport, own: Mapping[str, Any], everyone: Sequence[Sequence[Entry]], root: int, device: torch.device
) -> dict[str, Tensor]:
    """Return copies on the CPU of all ranks' tensors on rank `root`, nothing on the others; every rank calls it."""
    found: dict[str, Tensor] = {}
    for rank, entry in _in_turns(everyone):
        if transport.rank == root:
            value = own[entry.name] if rank == root else _receive(transport, rank, entry, device)
            # Received in any case: the sender does not know that its tensor is a copy.
            if entry.name not in found:  # the copies of a second route have the same values
                found[entry.name] = value.detach().cpu().clone()
        elif transport.rank == rank:
            _send(transport, root, own[entry.name], device)
    order = [entry.name for theirs in everyone for entry in theirs]
    return {name: found[name] for name in dict.fromkeys(order) if name in found}


def scatter_state(
    transport: Transport,
    full: Mapping[str, Any],
    everyone: Sequence[Sequence[Entry]],
    root: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return what `full` on rank `root` has for this rank, in this rank's types; every rank calls it."""
    given = set(cast("list[str]", Control(transport).all_gather_object(sorted(full))[root]))
    found: dict[str, Tensor] = {}
    for rank, entry in _in_turns([[entry for entry in theirs if entry.name in given] for theirs in everyone]):
        if transport.rank == root != rank:
            _send(transport, rank, full[entry.name].to(entry.dtype), device)
        elif transport.rank == rank:
            found[entry.name] = full[entry.name] if rank == root else _receive(transport, root, entry, device)
    return found


def load_own(stages: Sequence[Stage], state: Mapping[str, Any]) -> None:
    """Copy into a rank's layers what a state has for them."""
    for stage in stages:
        for layer, module in stage.layers.items():
            module.load_state_dict(part_of_state(layer, module, state), strict=False)


def require_fitting(given: Any, wanted: Iterable[Entry], known: Iterable[Entry], *, is_strict: bool) -> None:
    """Make sure that a state can be loaded as a whole.

    Raises:
        ConfigError: it is none; what is wanted is no tensor or has another shape; or, if it is strict, one that is
            wanted is missing, or one is not known in the whole model.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"a {type(given).__name__}; expected tensors by name, as state_dict() returns", key=KEY)
    if other := [key for key in given if not isinstance(key, str)]:
        raise ConfigError(f"it has the key {other[0]!r}; expected names, as state_dict() returns", key=KEY)
    shapes = {entry.name: entry.shape for entry in wanted}
    for name, shape in shapes.items():
        found = given.get(name)
        if name in given and not isinstance(found, Tensor):
            raise ConfigError(f"{name!r} is a {type(found).__name__}; expected a tensor", key=KEY)
        if isinstance(found, Tensor) and tuple(found.shape) != shape:
            raise ConfigError(f"{name!r} has the shape {tuple(found.shape)}; expected {shape}", key=KEY)
    if not is_strict:
        return
    if missing := [name for name in shapes if name not in given]:
        raise ConfigError(
            f"it lacks {listed(missing, quoted=repr)}.{nearest(missing[0], map(str, given))} Load a state of the same "
            "model, or pass strict=False to leave what is missing as it is",
            key=KEY,
        )
    names = {entry.name for entry in known}
    if strange := [str(name) for name, value in given.items() if name not in names and isinstance(value, Tensor)]:
        raise ConfigError(
            f"nothing in the model is named {listed(strange, quoted=repr)}.{nearest(strange[0], names)} Load a state "
            "of the same model, or pass strict=False to leave out what is unknown",
            key=KEY,
        )


def _in_turns(everyone: Sequence[Sequence[Entry]]) -> Iterator[tuple[int, Entry]]:
    """The first tensor of each rank, then the second of each."""
    for row in zip_longest(*everyone):
        yield from ((rank, entry) for rank, entry in enumerate(row) if entry is not None)


def _send(transport: Transport, peer: int, value: Tensor, device: torch.device) -> None:
    content = value.detach().to(device).contiguous().reshape(-1).view(torch.uint8)
    if content.numel():
        transport.wait(transport.post_send(peer, content))


def _receive(transport: Transport, peer: int, entry: Entry, device: torch.device) -> Tensor:
    """Return a peer's tensor; nothing is sent for one without elements."""
    value = torch.empty(entry.shape, dtype=entry.dtype, device=device)
    content = value.reshape(-1).view(torch.uint8)
    if content.numel():
        transport.wait(transport.post_receive(peer, content))
    return value
