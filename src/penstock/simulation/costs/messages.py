"""The costs of messages, by the stage that sends them and the direction they go; every message is one of these."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.placement import Placement
from penstock.simulation.costs.costs import Channel, Costs

FORWARD, BACKWARD = range(2)
"""Directions: outputs to the next stage, gradients to the previous one."""


@dataclass(frozen=True, slots=True, eq=False)
class MessageCosts:
    """[2, num_stages] by direction and sending stage; nothing is sent where a route ends or stays on its rank."""

    latency_s: NDArray[np.float64]
    wire_s: NDArray[np.float64]
    """Bytes over bandwidth, for a microbatch whose messages have the usual size."""
    is_exclusive: NDArray[np.bool_]


def message_costs(placement: Placement, costs: Costs) -> MessageCosts:
    """Look up the channel and the bytes of every stage's messages.

    Raises:
        ConfigError: if the costs are for another number of stages, or name a channel of a rank that does not exist.
    """
    shape = (2, placement.num_stages)
    table = MessageCosts(np.zeros(shape), np.zeros(shape), np.zeros(shape, np.bool_))
    num_bytes = costs.per_stage("message_bytes", placement.num_stages)
    channels = _special_channels(placement, costs)
    ranks = placement.rank_of_stage
    usual = Channel(-1, -1, costs.latency_s, costs.bandwidth_bytes_per_s, costs.is_exclusive)
    for direction, stage, neighbour in hops(placement):
        channel = channels.get((ranks[stage], ranks[neighbour]), usual)
        # A gradient has the size of the output it belongs to, which is the neighbour's.
        size = num_bytes[stage if direction == FORWARD else neighbour]
        table.latency_s[direction, stage] = channel.latency_s
        table.wire_s[direction, stage] = size / channel.bandwidth_bytes_per_s
        table.is_exclusive[direction, stage] = channel.is_exclusive
    return table


def hops(placement: Placement) -> Iterator[tuple[int, int, int]]:
    """Yield direction, sending and receiving stage of all messages between ranks."""
    for direction, neighbours in ((FORWARD, placement.next_stage), (BACKWARD, placement.previous_stage)):
        for stage, neighbour in enumerate(neighbours):
            if neighbour >= 0 and placement.rank_of_stage[neighbour] != placement.rank_of_stage[stage]:
                yield direction, stage, neighbour


def _special_channels(placement: Placement, costs: Costs) -> dict[tuple[int, int], Channel]:
    for channel in costs.channels:
        if not (0 <= channel.sender < placement.num_ranks and 0 <= channel.receiver < placement.num_ranks):
            raise costs.error(
                f"from rank {channel.sender} to rank {channel.receiver}, but there are {placement.num_ranks} ranks, "
                f"0 to {placement.num_ranks - 1}",
                "channels",
            )
    return {(channel.sender, channel.receiver): channel for channel in costs.channels}
