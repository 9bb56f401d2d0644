"""A profile in tables: seconds per stage and kind, channels, memory, and the stage that all wait for."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from penstock.cli.conclusion import busy_line
from penstock.execute.observing.rank_memory import memory_text
from penstock.ir.action import Kind
from penstock.partition.split import split_text
from penstock.show.text import count_of, format_bytes, format_seconds, time_unit
from penstock.simulation.costs.costs import Spread
from penstock.simulation.costs.messages import hops, message_costs
from penstock.tables import NO_SCREEN, Column, Screen, table_text
from penstock.train.profiling import Profile

NOT_RUN = ", where backwards are split"
EVEN = 1.05
"""The seconds of the busiest rank, in those of the mean rank, up to which there is no bottleneck."""


def profile_text(profile: Profile, screen: Screen = NO_SCREEN) -> str:
    """Return all measurements of a profile as tables and lines."""
    memory = [memory_text(profile.memory, profile.predicted_bytes, screen)] if profile.memory else []
    launch = f"launch: {format_seconds(profile.costs.launch_s)} of the host for each instruction"
    busy = busy_line(profile.costs.spreads, profile.program.placement.rank_of_stage)
    last = [screen.wrapped(line) for line in (launch, busy, bottleneck(profile)) if line]
    parts = [
        _table_of_stages(profile, screen),
        *_channels(profile, screen),
        *_exchanges(profile, screen),
        *memory,
        *last,
    ]
    return "\n\n".join(parts)


def bottleneck(profile: Profile) -> str:
    """Return a line with the stage that takes longest, and the rank that has most to do."""
    program = profile.program
    runs = [kind for kind in Kind if (program.op == kind).any()]
    seconds = np.nan_to_num(profile.costs.durations_s(program.num_stages))[runs].sum(axis=0)
    ranks = np.array(program.placement.rank_of_stage)
    per_rank = np.bincount(ranks, weights=seconds)
    stage, rank = int(seconds.argmax()), int(per_rank.argmax())
    if per_rank[rank] <= EVEN * per_rank.mean():
        return f"no bottleneck: every rank computes for about {format_seconds(float(per_rank.mean()))} a microbatch"
    stage_text = f"stage {stage} on rank {ranks[stage]} takes {format_seconds(float(seconds[stage]))} a microbatch"
    more = "" if len(seconds) == len(per_rank) else f"; rank {rank} has most to do"
    share = per_rank[rank] / per_rank.mean()
    return f"bottleneck: {stage_text}{more}, {share:.2f} times the mean rank, and all others wait for it"


def _table_of_stages(profile: Profile, screen: Screen) -> str:
    """Return a table with the seconds of each stage and kind of computation, usual, median and spread.

    Kinds that the profiled schedule does not run, as split backwards, were measured in further steps; they are marked.
    """
    program, costs = profile.program, profile.costs
    spread_of = {(spread.kind, spread.stage): spread for spread in costs.spreads}
    table = costs.durations_s(program.num_stages)
    rows = []
    for stage, rank in enumerate(program.placement.rank_of_stage):
        for kind in Kind:
            runs = bool(((program.op == kind) & (program.stage == stage)).any())
            if not runs and (kind, stage) not in spread_of:
                continue
            usual_s = float(table[kind, stage])
            spread = spread_of.get((kind, stage), Spread(kind, stage, usual_s, 0.0))
            name = kind.name.lower().replace("_", " ") + ("" if runs else NOT_RUN)
            seconds = (usual_s, spread.median_s, spread.quartile_range_s)
            rows.append([str(stage), str(rank), name, *_side_by_side(seconds)])
        if costs.split_forward_s:
            prepared_s = float(costs.per_stage("split_forward_s", program.num_stages)[stage])
            rows.append([str(stage), str(rank), f"forward{NOT_RUN}", format_seconds(prepared_s), "", ""])
    split = split_text(profile.layer_costs.split)
    title = f"{program.name}, {count_of(profile.num_steps, 'recorded step')}, {split}"
    columns = [
        Column("stage"),
        Column("rank"),
        Column("kind", is_text=True),
        Column("usual"),
        Column("median", drop_order=2),
        Column("middle half within", drop_order=1),
    ]
    return f"{title}\n{table_text(columns, rows, screen)}"


def _channels(profile: Profile, screen: Screen) -> Iterator[str]:
    if not profile.channels:
        return
    placement = profile.program.placement
    latency_s, ranks = message_costs(placement, profile.costs).latency_s, placement.rank_of_stage
    latencies = {
        (ranks[stage], ranks[neighbour]): float(latency_s[direction, stage])
        for direction, stage, neighbour in hops(placement)
    }
    rows = []
    for channel in profile.channels:
        pair = (channel.sender, channel.receiver)
        speed = _speed(channel.bandwidth_bytes_per_s)
        rows.append([f"{pair[0]} to {pair[1]}", *_side_by_side((latencies[pair], channel.latency_s)), speed])
    numbers = [Column("latency"), Column("latency of a ping", drop_order=1), Column("bandwidth")]
    yield table_text([Column("channel", is_text=True), *numbers], rows, screen)


def _exchanges(profile: Profile, screen: Screen) -> Iterator[str]:
    exchanges = profile.exchanges
    if exchanges is None:
        return
    names, num_stages = ("parameter_bytes", "gradient_bytes"), len(exchanges.reduce_s)
    sizes = zip(*(profile.costs.spread_out(name, num_stages, "stage") for name in names), strict=True)
    seconds = zip(exchanges.unshard_s, exchanges.reduce_s, strict=True)
    rows = [
        [str(stage), *_side_by_side(stage_s), *map(format_bytes, map(int, stage_bytes))]
        for stage, (stage_s, stage_bytes) in enumerate(zip(seconds, sizes, strict=True))
    ]
    columns = [Column("stage"), Column("gather"), Column("reduction"), Column("weights"), Column("gradients")]
    link = (
        f"between {count_of(exchanges.replicas, 'replica')}: latency {format_seconds(exchanges.replica_latency_s)}, "
        f"bandwidth {_speed(exchanges.replica_bandwidth_bytes_per_s)}"
    )
    yield f"{screen.wrapped(link)}\n{table_text(columns, rows, screen)}"


def _speed(bandwidth_bytes_per_s: float) -> str:
    return "-" if math.isinf(bandwidth_bytes_per_s) else f"{format_bytes(round(bandwidth_bytes_per_s))}/s"


def _side_by_side(durations_s: Sequence[float]) -> list[str]:
    """Write durations; 0, which has no natural unit, in that of the smallest other: seconds would look coarser."""
    unit = time_unit(min((duration_s for duration_s in durations_s if duration_s), default=0.0))[1]
    return [format_seconds(duration_s) if duration_s else f"0.00 {unit}" for duration_s in durations_s]
