"""How fast the channels between ranks are: round trips of a small and of a large message.

sender     post small ─► ... ◄─ answer     the shortest of several round trips, half of it is the latency
sender     post large ─► ... ◄─ answer     what it takes longer, the additional bytes take on the wire
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any, cast

import torch

from penstock.execute.control.collectives import Control
from penstock.execute.observing.clock import ask, reply
from penstock.execute.transport.protocol import Transport
from penstock.placement import Placement

NUM_TRIPS = 8
SMALL_BYTES = 8


@dataclass(frozen=True, slots=True)
class ChannelSpeed:
    """What was measured of one channel while nothing else ran."""

    sender: int
    receiver: int
    latency_s: float
    bandwidth_bytes_per_s: float
    """Infinite where a large message took no longer than a small one."""


def channels_of(placement: Placement) -> list[tuple[int, int]]:
    """Return the ranks (sender, receiver) between which outputs or gradients go."""
    ranks = placement.rank_of_stage
    pairs = {
        (ranks[stage], ranks[neighbour])
        for neighbours in (placement.next_stage, placement.previous_stage)
        for stage, neighbour in enumerate(neighbours)
        if neighbour >= 0 and ranks[stage] != ranks[neighbour]
    }
    return sorted(pairs)


def measure_channels(
    transport: Transport, channels: Sequence[tuple[int, int]], num_bytes: int, device: torch.device
) -> list[ChannelSpeed]:
    """Measure one channel after the other with messages of up to so many bytes; a collective, equal on all ranks."""
    found = []
    for sender, receiver in channels:
        Control(transport).all_gather_object(None)  # nobody else talks meanwhile
        if transport.rank == sender:
            found.append(asdict(_measure(transport, receiver, num_bytes, device)))
        elif transport.rank == receiver:
            _answer(transport, sender, num_bytes, device)
    everyone = cast(list[list[dict[str, Any]]], Control(transport).all_gather_object(found))
    by_channel = {(row["sender"], row["receiver"]): ChannelSpeed(**row) for rows in everyone for row in rows}
    return [by_channel[channel] for channel in channels]


def _measure(transport: Transport, receiver: int, num_bytes: int, device: torch.device) -> ChannelSpeed:
    answer = torch.zeros(SMALL_BYTES, dtype=torch.uint8, device=device)
    shortest_s = []
    for size in (SMALL_BYTES, num_bytes):
        payload = torch.zeros(size, dtype=torch.uint8, device=device)
        round_trips = [ask(transport, receiver, payload, answer, time.perf_counter) for _ in range(NUM_TRIPS)]
        shortest_s.append(min(end_s - begin_s for begin_s, end_s in round_trips))
    small_s, large_s = shortest_s
    longer_s = large_s - small_s
    bandwidth = (num_bytes - SMALL_BYTES) / longer_s if longer_s > 0 else inf
    return ChannelSpeed(transport.rank, receiver, small_s / 2, bandwidth)


def _answer(transport: Transport, sender: int, num_bytes: int, device: torch.device) -> None:
    answer = torch.zeros(SMALL_BYTES, dtype=torch.uint8, device=device)
    for size in (SMALL_BYTES, num_bytes):
        reply(transport, sender, torch.zeros(size, dtype=torch.uint8, device=device), lambda: answer, NUM_TRIPS)
