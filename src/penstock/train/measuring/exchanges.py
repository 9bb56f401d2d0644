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
from penstock.execute.replicas.lane import ReplicaLane
from penstock.execute.transport.protocol import Transport
from penstock.pipeline import Pipeline
from penstock.placement import Placement
from penstock.simulation import Costs, LayerCosts
from penstock.simulation.costs.costs import Channel

NUM_WARM_UP_ROUNDS, NUM_ROUNDS = 1, 7
SMALL_BYTES, LARGE_BYTES = 8, 1 << 20
"""Of messages: the small one, and that which a replica sends to each other one to measure the link."""
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
    found = []
    for sender, receiver in channels:
        Control(transport).all_gather_object(None)  # nobody else talks meanwhile
        if transport.rank == sender:
            found.append(asdict(_measure(transport, receiver, num_bytes, device)))
        elif transport.rank == receiver:
            _answer(transport, sender, num_bytes, device)
    everyone: list[Any] = Control(transport).all_gather_object(found)
    by_channel = {(row["sender"], row["receiver"]): Channel(**row) for rows in everyone for row in rows}
    return [by_channel[channel] for channel in channels]


def _measure(transport: Transport, receiver: int, num_bytes: int, device: torch.device) -> Channel:
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
    """[num_stages] what gathering the parameters of each stage takes; of stages that share some, the first has all."""
    reduce_s: tuple[float, ...]
    replica_latency_s: float
    """Of a gather with next to nothing in it."""
    replica_bandwidth_bytes_per_s: float
    """At which a replica sends its part of a gather to others, and receives theirs."""

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
    """Return the part of each layer in the seconds of its stage; of two copies of a layer, the mean."""
    total, num_copies = np.zeros(len(sizes)), np.zeros(len(sizes))
    for part, of_stage in zip(layers_of_stage, seconds, strict=True):
        own = np.array([sizes[layer] for layer in part], np.float64)
        total[list(part)] += of_stage * (own / own.sum() if own.any() else 1 / len(part))
        num_copies[list(part)] += 1
    return tuple((total / num_copies).tolist())


def measure_exchanges(pipeline: Pipeline) -> Exchanges | None:
    """Measure the exchanges of a pipeline's replicas; None where it has one. A collective, between two steps.

    Gradients are gone afterwards.
    """
    control, device = pipeline.control, pipeline.device
    data = control.places.data
    if data is None:
        return None
    found: dict[str, Any] = {}
    for place in range(control.transport.num_ranks):
        control.all_gather_object(None)  # nobody else talks meanwhile
        if place == control.transport.rank:
            found = {"link": _measure_link(control, data, device), "stages": {}}
            for unit in pipeline.units:
                found["stages"] |= _measure_unit(control, unit, device)
    everyone: list[Any] = control.all_gather_object(found)
    seconds = np.array([
        [_latest_s([own["stages"][name][kind] for own in everyone if name in own["stages"]]) for kind in (0, 1)]
        for name in map(str, range(pipeline.program.num_stages))
    ])  # fmt: skip
    small_s, large_s = np.min([own["link"] for own in everyone], axis=0).tolist()
    sent_bytes = (data.num_ranks - 1) * (LARGE_BYTES - SMALL_BYTES)
    return Exchanges(
        replicas=data.num_ranks,
        shards=data.num_ranks if pipeline.options.is_sharded else 1,
        unshard_s=tuple(seconds[:, 0].tolist()),
        reduce_s=tuple(seconds[:, 1].tolist()),
        replica_latency_s=small_s,
        replica_bandwidth_bytes_per_s=sent_bytes / (large_s - small_s) if large_s > small_s else inf,
    )


def _latest_s(replicas: Sequence[Sequence[float]]) -> float:
    """The median over the rounds of the replica that is done last."""
    return float(median(max(seconds) for seconds in zip(*replicas, strict=True)))


def _measure_unit(control: Control, unit: Unit, device: torch.device) -> dict[str, list[list[float]]]:
    """Return, per stage of a unit, the seconds of its gathers and of its reductions, round by round."""
    rounds = [_round(control, unit, device) for _ in range(NUM_WARM_UP_ROUNDS + NUM_ROUNDS)]
    rounds = rounds[NUM_WARM_UP_ROUNDS:]
    return {
        str(stage.index): [[each[stage.index][kind] for each in rounds] for kind in (0, 1)] for stage in unit.stages
    }


def _round(control: Control, unit: Unit, device: torch.device) -> dict[int, tuple[float, float]]:
    """Gather a unit and reduce its gradients as a step does; return the seconds of both per stage."""
    layout, stages = unit.layout, unit.stages
    found = {stage.index: (0.0, 0.0) for stage in stages}
    layout.begin_step(is_synced=True, sums_tied=True, is_training=True)
    unit.gradients.begin_step()
    try:
        gather_s = _seconds(control, layout.unshard, device)
        held = dict.fromkeys(each for stage in stages for each in stage.parameters())  # whole ones
        for parameter in held:
            if parameter.requires_grad:
                unit.gradients.put(parameter, dense_gradient(parameter, unit.gradients.attribute))
        for stage in stages[:1] if gather_s else stages:  # what is gathered as one is reduced as one
            reduce_s = _seconds(control, partial(layout.reduce, stage.index, is_last=True), device)
            found[stage.index] = gather_s, reduce_s
        layout.reshard()
    except BaseException:
        layout.end_failed_step()
        raise
    finally:
        unit.gradients.end_step()
        drop_gradients(each for stage in stages for each in stage.parameters())
    return found


def _seconds(control: Control, launch: Callable[[], Any], device: torch.device) -> float:
    """Let all replicas launch something together; return after how long this one has it, 0 if nothing is launched."""
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
    lane = ReplicaLane(data)

    def gather(part: torch.Tensor) -> Launched:
        return Launched(lane, lane.gather([part], lambda wholes: None))

    sizes = (SMALL_BYTES, LARGE_BYTES)
    parts = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
    rounds = range(NUM_WARM_UP_ROUNDS + NUM_ROUNDS)
    return [min([_seconds(control, partial(gather, part), device) for _ in rounds]) for part in parts]
