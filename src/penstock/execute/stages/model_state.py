"""The state of the model by the unsplit model's names: of one rank's layers, or of all, gathered on one rank.

    gather     root <-- first tensor of rank 1, first of rank 2, ... <-- second of rank 1, ...
    scatter    root --> first tensor of rank 1, first of rank 2, ... --> second of rank 1, ...

Taking turns keeps every wait of a rank short, however much there is in all.
Guarantees: nothing is changed before every rank has found the state right. Relies on: no step runs meanwhile.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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


def entries_of_ranks(transport: Transport, local_state: Mapping[str, Any]) -> list[list[Entry]]:
    """Return, per rank, the tensors of its state; every rank calls it."""
    tensors = {name: value for name, value in local_state.items() if isinstance(value, Tensor)}
    local_rows = [[name, str(value.dtype), [*value.shape]] for name, value in tensors.items()]
    rows_of_ranks: list[Any] = Control(transport).all_gather_object(local_rows)
    return [[Entry(name, _DTYPES[dtype], tuple(shape)) for name, dtype, shape in rows] for rows in rows_of_ranks]


def gather_state(
    transport: Transport,
    local_state: Mapping[str, Any],
    entries_by_rank: Sequence[Sequence[Entry]],
    root: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return copies on the CPU of all ranks' tensors on rank `root`, nothing on the others; every rank calls it."""
    gathered: dict[str, Tensor] = {}
    for rank, entry in _in_turns(entries_by_rank, None):
        if transport.rank == root:
            value = local_state[entry.name] if rank == root else _receive(transport, rank, entry, device)
            # The tensor is received in any case: the sender does not know that it is a copy.
            if entry.name not in gathered:  # the copies of a second route have the same values
                gathered[entry.name] = value.detach().cpu().clone()
        elif transport.rank == rank:
            _send(transport, root, local_state[entry.name], device)
    order = [entry.name for rank_entries in entries_by_rank for entry in rank_entries]
    return {name: gathered[name] for name in dict.fromkeys(order) if name in gathered}


def scatter_state(
    transport: Transport,
    full: Mapping[str, Any],
    entries_by_rank: Sequence[Sequence[Entry]],
    root: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return what `full` on rank `root` has for this rank, in this rank's types; every rank calls it."""
    names_on_root = set(cast("list[str]", Control(transport).all_gather_object(sorted(full))[root]))
    local_part: dict[str, Tensor] = {}
    for rank, entry in _in_turns(entries_by_rank, names_on_root):
        if transport.rank == root != rank:
            _send(transport, rank, full[entry.name].to(entry.dtype), device)
        elif transport.rank == rank:
            local_part[entry.name] = full[entry.name] if rank == root else _receive(transport, root, entry, device)
    return local_part


def load_own(stages: Sequence[Stage], state: Mapping[str, Any]) -> None:
    """Copy into a rank's layers what a state has for them."""
    for stage in stages:
        for layer, module in stage.layers.items():
            module.load_state_dict(part_of_state(layer, module, state), strict=False)


def require_fitting(
    state: Any, local_entries: Iterable[Entry], all_entries: Iterable[Entry], *, is_strict: bool
) -> None:
    """Make sure, before anything is copied, that this rank can load all of a state dict.

    `state` is what the user passes to `load_state_dict`. An entry is the name, dtype and shape of a tensor of the
    model: `local_entries` are those that this rank loads, `all_entries` those of all ranks. `is_strict` is as in torch.

    Raises:
        ConfigError: the state is no mapping by name; a value of a local entry is no tensor, or has another shape; or,
            if strict, a local entry is missing, or the state has a tensor that is no entry of any rank.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"a {type(state).__name__}; expected tensors by name, as state_dict() returns", key=KEY)
    if invalid_keys := [key for key in state if not isinstance(key, str)]:
        raise ConfigError(f"it has the key {invalid_keys[0]!r}; expected names, as state_dict() returns", key=KEY)
    shapes = {entry.name: entry.shape for entry in local_entries}
    for name, shape in shapes.items():
        value = state.get(name)
        if name in state and not isinstance(value, Tensor):
            raise ConfigError(f"{name!r} is a {type(value).__name__}; expected a tensor", key=KEY)
        if isinstance(value, Tensor) and tuple(value.shape) != shape:
            raise ConfigError(f"{name!r} has the shape {tuple(value.shape)}; expected {shape}", key=KEY)
    if not is_strict:
        return
    if missing := [name for name in shapes if name not in state]:
        raise ConfigError(
            f"it lacks {listed(missing, quoted=repr)}.{nearest(missing[0], map(str, state))} Load a state of the same "
            "model, or pass strict=False to leave what is missing as it is",
            key=KEY,
        )
    # Values that are no tensors, such as the extra state of a module, may have any name.
    names = {entry.name for entry in all_entries}
    if unknown := [str(name) for name, value in state.items() if name not in names and isinstance(value, Tensor)]:
        raise ConfigError(
            f"nothing in the model is named {listed(unknown, quoted=repr)}.{nearest(unknown[0], names)} Load a state "
            "of the same model, or pass strict=False to leave out what is unknown",
            key=KEY,
        )


def _in_turns(entries_by_rank: Sequence[Sequence[Entry]], names: Collection[str] | None) -> Iterator[tuple[int, Entry]]:
    """Yield the first tensor of each rank, then the second of each; with `names`, only tensors of these names."""
    selected = [[entry for entry in entries if names is None or entry.name in names] for entries in entries_by_rank]
    for row in zip_longest(*selected):
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
