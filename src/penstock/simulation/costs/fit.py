"""From measured timelines to the costs that explain them, so that they, and other schedules, can be predicted."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isclose
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.awaits import gather_of_row
from penstock.ir.deps import NONE
from penstock.ir.operations import OPERATIONS, Group, Kind, Op
from penstock.ir.program import Program
from penstock.ir.timeline import Timeline
from penstock.simulation.blocks import data_ready_s
from penstock.simulation.costs.costs import FIELD_OF_KIND, Channel, Costs, PerStage, Spread
from penstock.simulation.costs.exchanges import exchanges_s
from penstock.simulation.costs.layer_costs import LayerCosts, split_sizes
from penstock.simulation.durations import IS_BESIDE, IS_BUSY
from penstock.simulation.message_latency import Transfers, message_latency_s, robust_mean


@dataclass(frozen=True, slots=True)
class SplitShares:
    """The time of backwards in two parts, in shares of a whole one and of the forward before it.

    Unless it was measured, halves are taken, as of the products of matrices, and a forward that is no longer for it.
    One number is for all stages; otherwise there is one per stage.
    """

    forward: float | PerStage = 1.0
    """Of a forward that prepares a split backward, as a share of another forward."""
    input: float | PerStage = 0.5
    weight: float | PerStage = 0.5

    @classmethod
    def of(cls, costs: Costs | LayerCosts, layers_of_stage: Sequence[range] = ()) -> "SplitShares | None":
        """Return what costs say of it; None where they do not know both whole backwards and their parts.

        Costs per layer say it of each stage where `layers_of_stage` is a split of their layers.
        """
        is_split = False
        if isinstance(costs, LayerCosts):
            is_split = sum(split_sizes(layers_of_stage)) == costs.num_layers
            costs = costs.of_stages(layers_of_stage if is_split else [costs.num_layers])
        forward, whole = costs.forward_s, costs.backward_s
        prepared, inputs, weights = costs.split_forward_s or forward, costs.backward_input_s, costs.backward_weight_s
        if not (sum(forward) and sum(whole) and inputs and weights):
            return None
        pairs = ((prepared, forward), (inputs, whole), (weights, whole))
        of_all = cls(*(sum(part) / sum(of) for part, of in pairs))
        if not is_split or not min(*forward, *whole):
            return of_all
        return cls(*(tuple(np.divide(part, of).tolist()) for part, of in pairs))


HALVES = SplitShares()

Ends = tuple[int, int]
"""Sending and receiving rank."""
NOTHING_MEASURED: Mapping[Ends, float] = MappingProxyType({})

Floats = NDArray[np.float64]
Samples = dict[tuple[Kind, int], Floats]
"""By kind and stage: the seconds of all computations."""


def costs_from_timeline(timeline: Timeline) -> Costs:
    """Estimate costs from one timeline, as `costs_from_timelines` does."""
    return costs_from_timelines([timeline])


def costs_from_timelines(
    timelines: Sequence[Timeline],
    *,
    message_bytes: Sequence[int] = (),
    bandwidths: Mapping[Ends, float] = NOTHING_MEASURED,
    shares: SplitShares = HALVES,
) -> Costs:
    """Estimate costs from timelines of one program, by robust means, so that a single slow instruction counts nothing.

    A computation takes its mean over the microbatches of its stage, a gather or reduction what `exchanges_s` says. A
    launch is the mean gap between computations for each instruction in it, where no message was late and no collective
    or copy was between them. Latencies come from the messages that were waited for, since only they show it, less what
    `message_bytes` per stage take at `bandwidths`, in bytes per second, of channels that were measured by themselves.
    The seconds of backwards that did not run, whole or in parts, follow by their `shares` from those that did; they are
    0 where nothing is known.
    """
    program = timelines[0].program
    samples = _samples(timelines)
    found = {name: np.full(program.num_stages, np.nan) for name in FIELD_OF_KIND.values()}
    for (kind, stage), seconds in samples.items():
        found[FIELD_OF_KIND[kind]][stage] = robust_mean(seconds)
    forward, again = found["forward_s"], found["recompute_s"]
    whole, inputs, weights = (found[name] for name in ("backward_s", "backward_input_s", "backward_weight_s"))
    of_forward, of_input, of_weight = map(np.array, (shares.forward, shares.input, shares.weight))
    prepared = np.where(np.isnan(inputs), forward * of_forward, forward)
    forward = np.where(np.isnan(inputs), forward, forward / of_forward)
    whole = np.where(np.isnan(whole), (inputs + weights) / (of_input + of_weight), whole)
    inputs = np.where(np.isnan(inputs), whole * of_input, inputs)
    weights = np.where(np.isnan(weights), whole * of_weight, weights)
    transfers, sizes = Transfers.of(program), tuple(message_bytes) or (0,)
    latency_s = message_latency_s(timelines, transfers)
    launch_s, exchanged = _launch_s(timelines, transfers, latency_s), exchanges_s(timelines)
    speeds = np.array([bandwidths.get(ends, inf) for ends in transfers.ends])
    on_wire_s = transfers.num_bytes(program, sizes) / speeds
    latencies_s = np.maximum(latency_s - on_wire_s - launch_s, 0.0)
    default = Channel(0, 0, _median(latencies_s), float(np.median(speeds)) if len(speeds) else inf, bool(bandwidths))
    return Costs(
        forward_s=_per_stage(forward),
        split_forward_s=_per_stage(prepared) if (of_forward != 1).any() else (),
        backward_s=_per_stage(whole),
        backward_input_s=_per_stage(inputs),
        backward_weight_s=_per_stage(weights),
        recompute_s=() if np.isnan(again).all() else _per_stage(np.where(np.isnan(again), forward, again)),
        optimizer_s=_optimizer_s(timelines),
        unshard_s=_per_stage(exchanged[Op.UNSHARD]) if exchanged[Op.UNSHARD].any() else (0.0,),
        reduce_s=_per_stage(exchanged[Op.REDUCE_GRADIENT]) if exchanged[Op.REDUCE_GRADIENT].any() else (0.0,),
        latency_s=default.latency_s,
        bandwidth_bytes_per_s=default.bandwidth_bytes_per_s,
        is_exclusive=default.is_exclusive,
        channels=tuple(_special_channels(transfers, latencies_s, speeds, default)),
        message_bytes=sizes,
        launch_s=launch_s,
        **_sizes(timelines[0]),
        spreads=tuple(_spreads(samples)),
    )


def _sizes(timeline: Timeline) -> dict[str, Any]:
    """The sizes that a predicted timeline has; a measured one has none."""
    if timeline.sizes is None:
        return {}
    sizes = {"activation_bytes": timeline.sizes.activation, "weight_context_bytes": timeline.sizes.weight_context}
    return {name: tuple(each.tolist()) for name, each in sizes.items()}


def _samples(timelines: Sequence[Timeline]) -> Samples:
    program = timelines[0].program
    durations_s = [timeline.end_s - timeline.start_s for timeline in timelines]
    found: Samples = {}
    for kind in Kind:
        for stage in range(program.num_stages):
            rows = (program.op == kind) & (program.stage == stage)
            if rows.any():
                found[kind, stage] = np.concatenate([duration_s[rows] for duration_s in durations_s])
    return found


def _spreads(samples: Samples) -> Iterator[Spread]:
    """The spreads that are not 0."""
    for (kind, stage), seconds in samples.items():
        low, middle, high = np.percentile(seconds, (25, 50, 75)).tolist()
        if high > low:
            yield Spread(kind, stage, middle, high - low)


def _per_stage(durations_s: Floats) -> PerStage:
    return tuple(np.maximum(np.nan_to_num(durations_s), 0.0).tolist())


def _launch_s(timelines: Sequence[Timeline], transfers: Transfers, latency_s: Floats) -> float:
    """Host seconds per instruction, over all gaps between computations in which the host was not held up.

    To launch a computation takes less than to post a message, so each sort of gap is looked at by itself.
    """
    program = timelines[0].program
    num_busy = np.cumsum((IS_BUSY | IS_BESIDE)[program.op])
    awaits_gather = gather_of_row(program) != NONE
    gaps_s: dict[tuple[int, bool], list[float]] = {}
    for timeline in timelines:
        late = transfers.idle_from_s(timeline) < timeline.end_s[transfers.sends] + latency_s
        for rows in (timeline.compute_rows(rank) for rank in range(timeline.num_ranks)):
            earlier, later = rows[:-1], rows[1:]
            has_waited = data_ready_s(timeline, later) > timeline.end_s[earlier]
            # No collective, copy or optimizer step between them, and no gather to wait for.
            is_free = (num_busy[later] == num_busy[earlier] + 1) & ~awaits_gather[later]
            counts = is_free & ~np.isin(later, transfers.consumers[late]) & ~program.joined[earlier] & ~has_waited
            gap_s, lengths = timeline.start_s[later] - timeline.end_s[earlier], later - earlier
            takes = np.isin(later, transfers.consumers)
            for sort in zip(lengths[counts].tolist(), takes[counts].tolist(), gap_s[counts].tolist(), strict=True):
                gaps_s.setdefault(sort[:2], []).append(sort[2])
    num_launches = sum(length * len(gaps) for (length, _), gaps in gaps_s.items())
    total_s = sum(robust_mean(np.array(gaps)) * len(gaps) for gaps in gaps_s.values())
    return max(total_s / num_launches, 0.0) if num_launches else 0.0


def _special_channels(transfers: Transfers, latencies_s: Floats, speeds: Floats, default: Channel) -> Iterator[Channel]:
    """The channels whose messages take another time than the usual one."""
    ends = np.array(transfers.ends).reshape(-1, 2)
    for sender, receiver in np.unique(ends, axis=0).tolist():
        own = (ends == (sender, receiver)).all(axis=1)
        latency_s, speed = _median(latencies_s[own]), float(speeds[own][0])
        is_usual = isclose(latency_s, default.latency_s, rel_tol=1e-9, abs_tol=1e-12)
        if not is_usual or speed != default.bandwidth_bytes_per_s:
            yield Channel(sender, receiver, latency_s, speed, default.is_exclusive)


def _optimizer_s(timelines: Sequence[Timeline]) -> PerStage:
    """A rank's optimizer step, shared equally by its stages."""
    program: Program = timelines[0].program
    rows = program.rows_of(np.array([OPERATIONS[op].group is Group.PIPELINE for op in Op]))
    if not len(rows):
        return (0.0,)
    seconds = np.median([timeline.end_s[rows] - timeline.start_s[rows] for timeline in timelines], axis=0)
    of_rank = dict(zip(program.rank_of_row[rows].tolist(), seconds.tolist(), strict=True))
    stages_of_rank = program.placement.stages_of_rank
    return tuple(of_rank.get(rank, 0.0) / len(stages_of_rank[rank]) for rank in program.placement.rank_of_stage)


def _median(values_s: Floats) -> float:
    return max(float(np.median(values_s)), 0.0) if len(values_s) else 0.0
