"""The state of shards as whole tensors: put together on the first replica, and dealt out by it, one at a time."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.execute.control.collectives import Control
from penstock.execute.replicas.rows import Rows
from penstock.execute.transport.protocol import Transport, wait_for_all
from penstock.execute.values.tensors import is_dtensor, is_replicated, local_part, stored


class WholeState(Mapping[str, Any]):
    """A rank's state on the first replica, with whole tensors: each is received when it is read, once and in order.

    The other replicas call `send_rows` meanwhile. A wait raises PeerLost, DeadlineExceeded.
    """

    def __init__(self, local_state: Mapping[str, Any], data: Transport | None) -> None:
        self._local_state = local_state
        self._data = data

    def __getitem__(self, name: str) -> Any:
        value = self._local_state[name]
        if self._data is None or not _is_shared_out(value):
            return local_part(value) if is_dtensor(value) else value
        rows = Rows.of(value, self._data.num_ranks)
        local_rows = _flat(value, rows)
        memory = local_rows.new_empty(rows.num_replicas * rows.part_elements)
        parts = memory.view(rows.num_replicas, rows.part_elements)
        parts[0, : local_rows.numel()] = local_rows
        for replica in range(1, rows.num_replicas):
            room = parts[replica, : len(rows.of_replica(replica)) * rows.row_elements]
            if room.numel():
                self._data.wait(self._data.post_receive(replica, room))
        return rows.whole_in(memory)

    def __iter__(self) -> Iterator[str]:
        return iter(self._local_state)

    def __len__(self) -> int:
        return len(self._local_state)


def send_rows(local_state: Mapping[str, Any], data: Transport) -> None:
    """Send this replica's rows of all tensors to the first one, in order. Raises: PeerLost, DeadlineExceeded."""
    for value in local_state.values():
        if _is_shared_out(value):
            part = _flat(value, Rows.of(value, data.num_ranks))
            if part.numel():
                data.wait(data.post_send(0, part))


def deal_out(control: Control, local_state: Mapping[str, Any], loaded_state: Mapping[str, Any]) -> dict[str, Any]:
    """Fill this replica's shards in `local_state` from what the first replica was given; return what is no shard.

    The first replica has loaded a whole tensor, or every replica a shard like its own. Every rank calls this.

    Raises: PeerLost, DeadlineExceeded.
    """
    shards = {name: value for name, value in local_state.items() if is_dtensor(value)}
    report: dict[str, bool] = control.across(
        {name: is_dtensor(loaded_state[name]) for name in shards if name in loaded_state}
    )[0]
    with torch.no_grad():
        for name, is_shard in report.items():
            shard = local_part(shards[name])
            if is_shard:
                shard.copy_(local_part(loaded_state[name]))
            else:
                shard.copy_(_own_rows(control.places.data, shards[name], loaded_state.get(name)))
    return {name: value for name, value in loaded_state.items() if name not in shards}


def _own_rows(data: Transport | None, shard: Tensor, tensor: Tensor | None) -> Tensor:
    """Return this replica's rows of a tensor that the first one has."""
    replica, num_replicas = (0, 1) if data is None else (data.rank, data.num_ranks)
    rows, like = Rows.of(shard, num_replicas), local_part(shard)
    parts = like.new_empty(num_replicas if replica == 0 else 1, rows.part_elements)
    if replica == 0:
        assert tensor is not None
        rows.share_out(tensor.detach().to(like), parts)
    if data is not None and parts.numel():
        if replica == 0:
            wait_for_all(data, [data.post_send(peer, parts[peer]) for peer in range(1, num_replicas)])
        else:
            data.wait(data.post_receive(0, parts[0]))
    return rows.own_in(parts[0], replica)


def _is_shared_out(value: object) -> bool:
    return isinstance(value, Tensor) and is_dtensor(value) and not is_replicated(value)


def _flat(shard: Tensor, rows: Rows) -> Tensor:
    """Return the rows that this replica has, in the order of their memory: [elements]."""
    return stored(local_part(shard), rows.order).reshape(-1)
