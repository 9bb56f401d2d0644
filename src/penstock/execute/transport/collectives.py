"""Collectives made of point-to-point messages.

Why not the backend's own: their deadline is fixed when a group is created, a stuck one blocks the group's end, and the
order of additions depends on the backend. Here every wait has the deadline of the moment, and sums are in rank order.
All messages go through rank 0 (or the root), on a lane of their own, so that receives posted ahead for
the pipeline never catch them.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import PipelineError
from penstock.execute.transport.protocol import Ticket
from penstock.execute.values.tensors import written_out


@dataclass(frozen=True, slots=True)
class Lane:
    """The channels that carry collectives, as one rank sees them."""

    rank: int
    num_ranks: int
    end_s: float
    """`time.monotonic()` at which the collective must be over."""
    device: torch.device
    post_send: Callable[[int, Tensor], Ticket]
    post_receive: Callable[[int, Tensor], Ticket]
    wait: Callable[[Ticket, float], None]
    """Waits for a ticket for at most so many seconds."""

    def send(self, peer: int, tensor: Tensor) -> None:
        self.finish(self.post_send(peer, tensor))

    def receive(self, peer: int, tensor: Tensor) -> None:
        self.finish(self.post_receive(peer, tensor))

    def finish(self, ticket: Ticket) -> None:
        self.wait(ticket, max(self.end_s - time.monotonic(), 0.0))


def all_reduce(lane: Lane, tensor: Tensor) -> None:
    """Sum over all ranks in rank order, in place."""
    total = written_out(tensor.detach()).contiguous()
    if lane.rank == 0:
        part = torch.empty_like(total)
        for peer in range(1, lane.num_ranks):
            lane.receive(peer, part)
            total += part
    else:
        lane.send(0, total)
    broadcast(lane, total, 0)
    _store(total, tensor)


def broadcast(lane: Lane, tensor: Tensor, root: int) -> None:
    """Copy the root's tensor to all ranks, in place."""
    if not 0 <= root < lane.num_ranks:
        raise PipelineError(
            f"rank {lane.rank}: broadcast from rank {root}, but there are ranks 0..{lane.num_ranks - 1}"
        )
    values = written_out(tensor.detach()).contiguous()
    if lane.rank != root:
        lane.receive(root, values)
        _store(values, tensor)
        return
    for ticket in [lane.post_send(peer, values) for peer in range(lane.num_ranks) if peer != root]:
        lane.finish(ticket)


def all_gather_object(lane: Lane, value: object) -> list[object]:
    """Collect the plain values of all ranks, in rank order, as JSON text: nothing of a peer is ever executed."""
    own = _encode(lane.rank, value)
    if lane.rank != 0:
        _send_bytes(lane, 0, own)
        everything: list[object] = json.loads(_receive_bytes(lane, 0))
        return everything
    texts = [own] + [_receive_bytes(lane, peer) for peer in range(1, lane.num_ranks)]
    answer = b"[" + b",".join(texts) + b"]"
    for peer in range(1, lane.num_ranks):
        _send_bytes(lane, peer, answer)
    gathered: list[object] = json.loads(answer)
    return gathered


def _encode(rank: int, value: object) -> bytes:
    # The standard library's JSON keeps NaN and infinities, which a loss may well be; orjson turns them into null.
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError) as error:
        raise PipelineError(
            f"rank {rank}: cannot send {value!r:.200} to the other ranks: {error}. Send numbers, text, lists or dicts",
            rank=rank,
        ) from error


def _send_bytes(lane: Lane, peer: int, text: bytes) -> None:
    lane.send(peer, torch.tensor([len(text)], dtype=torch.int64, device=lane.device))
    lane.send(peer, torch.frombuffer(bytearray(text), dtype=torch.uint8).to(lane.device))


def _receive_bytes(lane: Lane, peer: int) -> bytes:
    size = torch.zeros(1, dtype=torch.int64, device=lane.device)
    lane.receive(peer, size)
    text = bytearray(int(size))
    values = torch.empty(len(text), dtype=torch.uint8, device=lane.device)
    lane.receive(peer, values)
    torch.frombuffer(text, dtype=torch.uint8).copy_(values)
    return bytes(text)


def _store(values: Tensor, tensor: Tensor) -> None:
    """Copy back where `contiguous` had to make a copy."""
    if values.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(values)
