"""How long messages between ranks, and gathers and reductions between replicas, take by themselves.

Channels between the ranks of a pipeline: round trips of a small and of a large message.

sender     post small ─► ... ◄─ answer     the shortest of several round trips, half of it is the latency
sender     post large ─► ... ◄─ answer     what it takes longer, the additional bytes take on the wire

Replicas: all begin together, and nothing else runs meanwhile: the ranks of a pipeline take turns. The replica that is
done last counts, and of several rounds the median, as everything in it is there in a step, too: what is packed, sent,
added up and unpacked. Of the link itself the shortest round counts, as of the channels within a pipeline.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from statistics import median
from typing import Any

import numpy as np
import torch

from penstock.execute.accelerator import synchronize
from penstock.execute.control.collectives import Control
from penstock.execute.observing.clock import ask, reply
from penstock.execute.parameters.gradient_store import dense_gradient, drop_gradients
from penstock.execute.parameters.layout import Launched
from penstock.execute.rank_parameters import Unit
from penstock.execute.replicas.exchanges import ReplicaExchanges
from penstock.execute.transport.protocol import Transport
from penstock.pipeline import Pipeline
from penstock.placement import Placement
from penstock.simulation import Costs, LayerCosts
from penstock.simulation.costs.costs import Channel

NUM_WARM_UP_ROUNDS, NUM_ROUNDS = 1, 7
SMALL_BYTES, LARGE_BYTES = 8, 1 << 20
"""Bytes of the small message, and of the one that a replica sends to each other replica to measure the link."""
NUM_TRIPS = 8


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
) -> list[Channel]:
    """Measure one channel after the other with messages of up to so many bytes; a collective, equal on all ranks.

    The bandwidth is infinite where a large message took no longer than a small one.
    """
    local_channels = []
    for sender, receiver in channels:
        Control(transport).all_gather_object(None)  # all wait for the rank before
        if transport.rank == sender:
            local_channels.append(asdict(_measure_channel(transport, receiver, num_bytes, device)))
        elif transport.rank == receiver:
            _answer(transport, sender, num_bytes, device)
    channels_by_rank: list[Any] = Control(transport).all_gather_object(local_channels)
    measured_channels = {(row["sender"], row["receiver"]): Channel(**row) for rows in channels_by_rank for row in rows}
    return [measured_channels[channel] for channel in channels]


def _measure_channel(transport: Transport, receiver: int, num_bytes: int, device: torch.device) -> Channel:
    answer = torch.zeros(SMALL_BYTES, dtype=torch.uint8, device=device)
    shortest_s = []
    for size in (SMALL_BYTES, num_bytes):
        payload = torch.zeros(size, dtype=torch.uint8, device=device)
        round_trips = [ask(transport, receiver, payload, answer, time.perf_counter) for _ in range(NUM_TRIPS)]
        shortest_s.append(min(end_s - begin_s for begin_s, end_s in round_trips))
    small_s, large_s = shortest_s
    longer_s = large_s - small_s
    bandwidth = (num_bytes - SMALL_BYTES) / longer_s if longer_s > 0 else inf
    return Channel(transport.rank, receiver, small_s / 2, bandwidth)


def _answer(transport: Transport, sender: int, num_bytes: int, device: torch.device) -> None:
    answer = torch.zeros(SMALL_BYTES, dtype=torch.uint8, device=device)
    for size in (SMALL_BYTES, num_bytes):
        payload = torch.zeros(size, dtype=torch.uint8, device=device)
        reply(transport, sender, payload, lambda: answer, NUM_TRIPS)


@dataclass(frozen=True, slots=True)
class Exchanges:
    """The exchanges of replicas as they were measured, on every rank alike, by the names of `Costs`."""

    replicas: int
    shards: int
    unshard_s: tuple[float, ...]
    """[num_stages] Seconds of gathering the parameters of each stage; of stages that share some, the first has all."""
    reduce_s: tuple[float, ...]
    """[num_stages] Seconds of reducing the gradients of each stage over the replicas."""
    replica_latency_s: float
    """Seconds of a gather with next to nothing in it."""
    replica_bandwidth_bytes_per_s: float
    """The bandwidth at which a replica sends its part of a gather to the others, and receives their parts."""

    def added_to(self, costs: Costs) -> Costs:
        """Return costs with these seconds, from which those of other numbers of replicas follow."""
        return replace(costs, **asdict(self))

    def shared_out(self, costs: LayerCosts, layers_of_stage: Sequence[range]) -> LayerCosts:
        """Return costs per layer with what each layer takes of these seconds, by its bytes."""
        return replace(
            costs,
            unshard=_shares(self.unshard_s, costs.parameter_bytes, layers_of_stage),
            reduce=_shares(self.reduce_s, costs.gradient_bytes, layers_of_stage),
        )


def _shares(seconds: Sequence[float], sizes: Sequence[float], layers_of_stage: Sequence[range]) -> tuple[float, ...]:
    """Return the seconds of each layer: a share of its stage's by its size in `sizes`; of two copies, the mean."""
    total, num_copies = np.zeros(len(sizes)), np.zeros(len(sizes))
    for layers, stage_s in zip(layers_of_stage, seconds, strict=True):
        layer_sizes = np.array([sizes[layer] for layer in layers], np.float64)
        total[list(layers)] += stage_s * (layer_sizes / layer_sizes.sum() if layer_sizes.any() else 1 / len(layers))
        num_copies[list(layers)] += 1
    return tuple((total / num_copies).tolist())


def measure_exchanges(pipeline: Pipeline) -> Exchanges | None:
    """Measure what the replicas of a pipeline exchange (weights and gradients); None where there is one replica.

    Every rank calls it, between two steps; gradients are gone afterwards. The ranks of a pipeline measure one after
    another, each with its replicas, so that no other messages are on their way.
    """
    control, device = pipeline.control, pipeline.device
    replica_transport = control.places.data
    if replica_transport is None:
        return None
    measurements: dict[str, Any] = {}
    for rank in range(control.transport.num_ranks):
        control.all_gather_object(None)  # all wait for the rank before
        if rank == control.transport.rank:
            measurements = {"link": _measure_link(control, replica_transport, device), "stages": {}}
            for unit in pipeline.units:
                measurements["stages"] |= _measure_unit(control, unit, device)
    reports: list[Any] = control.all_gather_object(measurements)
    # Of the replicas of a stage, the latest counts: [num_stages, 2] seconds of a gather and of a reduction.
    seconds = np.array([
        [_latest_s([report["stages"][name][kind] for report in reports if name in report["stages"]]) for kind in (0, 1)]
        for name in map(str, range(pipeline.program.num_stages))
    ])  # fmt: skip
    # Messages of two sizes give latency and bandwidth.
    small_s, large_s = np.min([report["link"] for report in reports], axis=0).tolist()
    sent_bytes = (replica_transport.num_ranks - 1) * (LARGE_BYTES - SMALL_BYTES)
    return Exchanges(
        replicas=replica_transport.num_ranks,
        shards=replica_transport.num_ranks if pipeline.options.is_sharded else 1,
        unshard_s=tuple(seconds[:, 0].tolist()),
        reduce_s=tuple(seconds[:, 1].tolist()),
        replica_latency_s=small_s,
        replica_bandwidth_bytes_per_s=sent_bytes / (large_s - small_s) if large_s > small_s else inf,
    )


def _latest_s(replicas: Sequence[Sequence[float]]) -> float:
    """Return the median over the rounds of the seconds of the replica that is done last."""
    return float(median(max(seconds) for seconds in zip(*replicas, strict=True)))


def _measure_unit(control: Control, unit: Unit, device: torch.device) -> dict[str, list[list[float]]]:
    """Return, per stage of a unit, the seconds of its gathers and of its reductions, round by round."""
    rounds = [_exchange(control, unit, device) for _ in range(NUM_WARM_UP_ROUNDS + NUM_ROUNDS)]
    rounds = rounds[NUM_WARM_UP_ROUNDS:]
    return {
        str(stage.index): [[seconds_by_stage[stage.index][kind] for seconds_by_stage in rounds] for kind in (0, 1)]
        for stage in unit.stages
    }


def _exchange(control: Control, unit: Unit, device: torch.device) -> dict[int, tuple[float, float]]:
    """Gather a unit and reduce its gradients as a step does; return the seconds of both per stage."""
    layout, stages = unit.layout, unit.stages
    seconds_by_stage = {stage.index: (0.0, 0.0) for stage in stages}
    layout.begin_step(is_synced=True, sums_tied=True, is_training=True)
    unit.gradients.begin_step()
    try:
        gather_s = _seconds(control, layout.unshard, device)
        gathered_params = dict.fromkeys(param for stage in stages for param in stage.parameters())  # whole ones
        for gathered_param in gathered_params:
            if gathered_param.requires_grad:
                unit.gradients.put(gathered_param, dense_gradient(gathered_param, unit.gradients.attribute))
        for stage in stages[:1] if gather_s else stages:  # what is gathered as one is reduced as one
            reduce_s = _seconds(control, partial(layout.reduce, stage.index, is_last=True), device)
            seconds_by_stage[stage.index] = gather_s, reduce_s
        layout.reshard()
    except BaseException:
        layout.end_failed_step()
        raise
    finally:
        unit.gradients.end_step()
        drop_gradients(param for stage in stages for param in stage.parameters())
    return seconds_by_stage


def _seconds(control: Control, launch: Callable[[], Any], device: torch.device) -> float:
    """Launch an exchange on all replicas at once; return after how many seconds this one has it, 0 if it has none."""
    synchronize(device)
    control.across(None)
    begin_s = time.perf_counter()
    ticket = launch()
    if ticket is None:
        return 0.0
    ticket.wait()
    synchronize(device)
    return time.perf_counter() - begin_s


def _measure_link(control: Control, data: Transport, device: torch.device) -> list[float]:
    """Return the shortest seconds of a gather of small and of large parts."""
    lane = ReplicaExchanges(data)

    def gather(part: torch.Tensor) -> Launched:
        return Launched(lane, lane.gather([part], lambda wholes: None))

    sizes = (SMALL_BYTES, LARGE_BYTES)
    parts = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
    rounds = range(NUM_WARM_UP_ROUNDS + NUM_ROUNDS)
    return [min([_seconds(control, partial(gather, part), device) for _ in rounds]) for part in parts]
