"""From measured timelines to the costs that explain them, so that they, and other schedules, can be predicted."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isclose
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.awaits import gather_of_row
from penstock.ir.collectives import LOADS_DATA, UPDATES_WEIGHTS
from penstock.ir.deps import NONE
from penstock.ir.operations import Kind, Op
from penstock.ir.program import Program
from penstock.ir.timeline import Timeline
from penstock.simulation.blocks import data_ready_s
from penstock.simulation.costs.costs import FIELD_OF_KIND, Channel, Costs, PerStage, Spread
from penstock.simulation.costs.exchanges import exchanges_s
from penstock.simulation.costs.layer_costs import LayerCosts, split_sizes
from penstock.simulation.durations import IS_BESIDE, IS_BUSY, loaded_before
from penstock.simulation.message_latency import Transfers, message_latency_s, robust_mean


@dataclass(frozen=True, slots=True)
class SplitShares:
    """The time of backwards in two parts, in shares of a whole one and of the forward before it.

    Unless it was measured, halves are taken, as of the products of matrices, and a forward that is no longer for it.
    One number is for all stages; otherwise there is one per stage.
    """

    forward: float | PerStage = 1.0
    """The seconds of a forward that prepares a split backward, as a share of those of another forward."""
    input: float | PerStage = 0.5
    weight: float | PerStage = 0.5

    @classmethod
    def of(cls, costs: Costs | LayerCosts, layers_of_stage: Sequence[range] = ()) -> "SplitShares | None":
        """Return the shares in costs; None where these do not know both whole backwards and their parts.

        Costs per layer give the shares of each stage where `layers_of_stage` is a split of their layers.
        """
        is_split = False
        if isinstance(costs, LayerCosts):
            is_split = sum(split_sizes(layers_of_stage)) == costs.num_layers
            costs = costs.of_stages(layers_of_stage if is_split else [costs.num_layers])
        forward, backward = costs.forward_s, costs.backward_s
        split_forward = costs.split_forward_s or forward
        inputs, weights = costs.backward_input_s, costs.backward_weight_s
        if not (sum(forward) and sum(backward) and inputs and weights):
            return None
        pairs = ((split_forward, forward), (inputs, backward), (weights, backward))
        if not is_split or not min(*forward, *backward):
            return cls(*(sum(part) / sum(total) for part, total in pairs))
        return cls(*(tuple(np.divide(part, total).tolist()) for part, total in pairs))


HALVES = SplitShares()

RankPair = tuple[int, int]
"""The sending and the receiving rank of a channel."""
NOTHING_MEASURED: Mapping[RankPair, float] = MappingProxyType({})

Floats = NDArray[np.float64]
Samples = dict[tuple[Kind, int], Floats]
"""The seconds of all computations, by kind and stage."""


def costs_from_timeline(timeline: Timeline) -> Costs:
    """Estimate costs from one timeline, as `costs_from_timelines` does."""
    return costs_from_timelines([timeline])


def costs_from_timelines(
    timelines: Sequence[Timeline],
    *,
    message_bytes: Sequence[int] = (),
    bandwidths: Mapping[RankPair, float] = NOTHING_MEASURED,
    shares: SplitShares = HALVES,
) -> Costs:
    """Estimate costs from measured timelines of one program, by robust means that one slow instruction does not move.

    A computation takes the mean over the microbatches of its stage, and a gather or reduction what `exchanges_s` says.
    A launch is the host's time per instruction, from gaps between computations in which nothing else held the rank up.
    A channel's latency comes from the messages that were waited for, less the launch and what `message_bytes` (per
    stage) take at `bandwidths` (bytes per second) where a channel was measured by itself. The seconds of backwards that
    did not run, whole or in parts, follow by `shares` (the parts that I and W have in a backward) from those that did;
    they are 0 where nothing is known.
    """
    program = timelines[0].program
    samples = _samples(timelines)
    # Kinds that a stage never ran stay `nan` until shares fill them in.
    seconds_of_field = {name: np.full(program.num_stages, np.nan) for name in FIELD_OF_KIND.values()}
    for (kind, stage), seconds in samples.items():
        seconds_of_field[FIELD_OF_KIND[kind]][stage] = robust_mean(seconds)
    transfers, sizes = Transfers.of(program), tuple(message_bytes) or (0,)
    latency_s = message_latency_s(timelines, transfers)
    launch_s, exchanges = _launch_s(timelines, transfers, latency_s), exchanges_s(timelines)
    # A measured latency includes the launch and the time on the wire, which are costs of their own.
    speeds = np.array([bandwidths.get(ranks, inf) for ranks in transfers.rank_pairs])
    wire_s = transfers.num_bytes(program, sizes) / speeds
    latencies_s = np.maximum(latency_s - wire_s - launch_s, 0.0)
    # Most channels are alike: the median is the default, and those that differ are listed as `channels`.
    default = Channel(0, 0, _median(latencies_s), float(np.median(speeds)) if len(speeds) else inf, bool(bandwidths))
    return Costs(
        **_forwards_and_backwards(seconds_of_field, shares),
        optimizer_s=_optimizer_s(timelines),
        load_s=_load_s(timelines),
        unshard_s=_per_stage(exchanges[Op.UNSHARD]) if exchanges[Op.UNSHARD].any() else (0.0,),
        reduce_s=_per_stage(exchanges[Op.REDUCE_GRADIENT]) if exchanges[Op.REDUCE_GRADIENT].any() else (0.0,),
        latency_s=default.latency_s,
        bandwidth_bytes_per_s=default.bandwidth_bytes_per_s,
        is_exclusive=default.is_exclusive,
        channels=tuple(_special_channels(transfers, latencies_s, speeds, default)),
        message_bytes=sizes,
        launch_s=launch_s,
        **_sizes(timelines[0]),
        spreads=tuple(_spreads(samples)),
    )


def _forwards_and_backwards(measured_s: Mapping[str, Floats], shares: SplitShares) -> dict[str, Any]:
    """Return the fields of `Costs` for computations, from those measured [num_stages], NaN where none of a stage ran.

    Whole backwards follow from their parts, and parts from whole ones, by their shares. A stage whose backwards are
    split has measured forwards that prepare the split; an unprepared one follows by its share, and the other way round.
    """
    forward, backward, recompute = (measured_s[name] for name in ("forward_s", "backward_s", "recompute_s"))
    inputs, weights = measured_s["backward_input_s"], measured_s["backward_weight_s"]
    forward_share, input_share, weight_share = map(np.array, (shares.forward, shares.input, shares.weight))
    is_whole = np.isnan(inputs)
    split_forward = np.where(is_whole, forward * forward_share, forward)
    forward = np.where(is_whole, forward, forward / forward_share)
    backward = np.where(np.isnan(backward), (inputs + weights) / (input_share + weight_share), backward)
    inputs = np.where(is_whole, backward * input_share, inputs)
    weights = np.where(np.isnan(weights), backward * weight_share, weights)
    has_recompute = not np.isnan(recompute).all()
    return {
        "forward_s": _per_stage(forward),
        "split_forward_s": _per_stage(split_forward) if (forward_share != 1).any() else (),
        "backward_s": _per_stage(backward),
        "backward_input_s": _per_stage(inputs),
        "backward_weight_s": _per_stage(weights),
        "recompute_s": _per_stage(np.where(np.isnan(recompute), forward, recompute)) if has_recompute else (),
    }


def _sizes(timeline: Timeline) -> dict[str, Any]:
    """Return the sizes in bytes of a predicted timeline, by field of `Costs`; a measured one has none."""
    if timeline.sizes is None:
        return {}
    sizes = {"activation_bytes": timeline.sizes.activation, "weight_context_bytes": timeline.sizes.weight_context}
    return {name: tuple(bytes_of_stage.tolist()) for name, bytes_of_stage in sizes.items()}


def _samples(timelines: Sequence[Timeline]) -> Samples:
    program = timelines[0].program
    durations_s = [timeline.end_s - timeline.start_s for timeline in timelines]
    samples: Samples = {}
    for kind in Kind:
        for stage in range(program.num_stages):
            rows = (program.op == kind) & (program.stage == stage)
            if rows.any():
                samples[kind, stage] = np.concatenate([duration_s[rows] for duration_s in durations_s])
    return samples


def _spreads(samples: Samples) -> Iterator[Spread]:
    """Yield the spreads that are not 0."""
    for (kind, stage), seconds in samples.items():
        low, middle, high = np.percentile(seconds, (25, 50, 75)).tolist()
        if high > low:
            yield Spread(kind, stage, middle, high - low)


def _per_stage(durations_s: Floats) -> PerStage:
    return tuple(np.maximum(np.nan_to_num(durations_s), 0.0).tolist())


def _launch_s(timelines: Sequence[Timeline], transfers: Transfers, latency_s: Floats) -> float:
    """Return the host's seconds per instruction, from the gaps between computations in which nothing held the host up.

    `latency_s` [num_messages] are the seconds of each message. To launch a computation takes less than to post a
    message, so the robust mean is taken within each sort of gap: how many instructions the host launches in the gap,
    and whether the computation at its end consumes a message.
    """
    program = timelines[0].program
    num_busy = np.cumsum((IS_BUSY | IS_BESIDE)[program.op])
    awaits_gather = gather_of_row(program) != NONE
    gaps_s: dict[tuple[int, bool], list[float]] = {}
    for timeline in timelines:
        # A message is late if its receiver was idle before the message can have arrived.
        is_late = transfers.idle_from_s(timeline) < timeline.end_s[transfers.sends] + latency_s
        for rows in (timeline.compute_rows(rank) for rank in range(timeline.num_ranks)):
            earlier, later = rows[:-1], rows[1:]
            has_waited = data_ready_s(timeline, later) > timeline.end_s[earlier]
            # No collective, copy or optimizer step is between them, and there is no gather to wait for.
            is_free = (num_busy[later] == num_busy[earlier] + 1) & ~awaits_gather[later]
            is_counted = (
                is_free & ~np.isin(later, transfers.consumers[is_late]) & ~program.joined[earlier] & ~has_waited
            )
            gap_s, num_launched = timeline.start_s[later] - timeline.end_s[earlier], later - earlier
            consumes = np.isin(later, transfers.consumers)
            columns = (column[is_counted].tolist() for column in (num_launched, consumes, gap_s))
            for num_launched_in_gap, is_consumer, seconds in zip(*columns, strict=True):
                gaps_s.setdefault((num_launched_in_gap, is_consumer), []).append(seconds)
    num_launches = sum(num_launched_in_gap * len(gaps) for (num_launched_in_gap, _), gaps in gaps_s.items())
    total_s = sum(robust_mean(np.array(gaps)) * len(gaps) for gaps in gaps_s.values())
    return max(total_s / num_launches, 0.0) if num_launches else 0.0


def _special_channels(transfers: Transfers, latencies_s: Floats, speeds: Floats, default: Channel) -> Iterator[Channel]:
    """Yield the channels whose messages take another time than the usual one."""
    ranks = np.array(transfers.rank_pairs).reshape(-1, 2)
    for sender, receiver in np.unique(ranks, axis=0).tolist():
        of_channel = (ranks == (sender, receiver)).all(axis=1)
        latency_s, speed = _median(latencies_s[of_channel]), float(speeds[of_channel][0])
        is_usual = isclose(latency_s, default.latency_s, rel_tol=1e-9, abs_tol=1e-12)
        if not is_usual or speed != default.bandwidth_bytes_per_s:
            yield Channel(sender, receiver, latency_s, speed, default.is_exclusive)


def _optimizer_s(timelines: Sequence[Timeline]) -> PerStage:
    """Return the seconds of each rank's optimizer step, shared equally by its stages."""
    program: Program = timelines[0].program
    rows = program.rows_of(UPDATES_WEIGHTS)
    if not len(rows):
        return (0.0,)
    seconds = np.median([timeline.end_s[rows] - timeline.start_s[rows] for timeline in timelines], axis=0)
    of_rank = dict(zip(program.rank_of_row[rows].tolist(), seconds.tolist(), strict=True))
    stages_of_rank = program.placement.stages_of_rank
    return tuple(of_rank.get(rank, 0.0) / len(stages_of_rank[rank]) for rank in program.placement.rank_of_stage)


def _load_s(timelines: Sequence[Timeline]) -> PerStage:
    """Return the seconds of the LOADs of each stage, those that bring their microbatch."""
    program = timelines[0].program
    rows = np.setdiff1d(program.rows_of(LOADS_DATA), loaded_before(program))
    if not len(rows):
        return (0.0,)
    seconds = np.concatenate([timeline.end_s[rows] - timeline.start_s[rows] for timeline in timelines])
    stages = np.tile(program.stage[rows], len(timelines))
    return tuple(_median(seconds[stages == stage]) for stage in range(program.num_stages))


def _median(values_s: Floats) -> float:
    return max(float(np.median(values_s)), 0.0) if len(values_s) else 0.0
