"""From a measured timeline to the costs that explain it, so that it can be predicted again."""

import numpy as np
from numpy.typing import NDArray

from penstock.ir.action import Kind
from penstock.ir.deps import NONE, predecessors
from penstock.ir.instruction import Op
from penstock.ir.timeline import Timeline
from penstock.simulate.costs import Costs, PerStage

RECEIVES = (Op.RECEIVE_FORWARD, Op.RECEIVE_BACKWARD)


def costs_from_timeline(timeline: Timeline) -> Costs:
    """Estimate costs: medians, so that a single slow instruction counts little.

    A computation takes its median over the microbatches of its stage. A launch is the usual gap before a computation
    that waits for no message. The latency comes from the messages that were waited for, since only they show it.
    A kind of computation that did not run gets what follows from the others: a whole backward is the sum of its parts,
    and each part half of the whole; 0 where nothing is known.
    """
    before = predecessors(timeline.program)[:, 0]
    forward, whole, inputs, weights = _durations_s(timeline)
    whole = np.where(np.isnan(whole), inputs + weights, whole)
    inputs = np.where(np.isnan(inputs), whole / 2, inputs)
    weights = np.where(np.isnan(weights), whole / 2, weights)
    return Costs(
        forward_s=_per_stage(forward),
        backward_s=_per_stage(whole),
        backward_input_s=_per_stage(inputs),
        backward_weight_s=_per_stage(weights),
        latency_s=_latency_s(timeline, before),
        launch_s=_launch_s(timeline, before),
        activation_bytes=tuple(timeline.activation_bytes.tolist()),
        weight_context_bytes=tuple(timeline.weight_context_bytes.tolist()),
    )


def _durations_s(timeline: Timeline) -> NDArray[np.float64]:
    """[4, num_stages] median seconds by kind and stage; NaN where none ran."""
    program = timeline.program
    duration = timeline.end_s - timeline.start_s
    table = np.full((len(Kind), program.num_stages), np.nan)
    for kind in Kind:
        for stage in range(program.num_stages):
            rows = (program.op == kind) & (program.stage == stage)
            if rows.any():
                table[kind, stage] = np.median(duration[rows])
    return table


def _per_stage(durations_s: NDArray[np.float64]) -> PerStage:
    return tuple(np.maximum(np.nan_to_num(durations_s), 0.0).tolist())


def _launch_s(timeline: Timeline, before: NDArray[np.int32]) -> float:
    """Host seconds per instruction: the gap between two computations, shared by the instructions that fill it."""
    waits = np.isin(timeline.program.op[before], RECEIVES) & (before != NONE)
    gaps_s = []
    for rank in range(timeline.num_ranks):
        rows = timeline.compute_rows(rank)
        earlier, later = rows[:-1], rows[1:]
        is_free = ~waits[later] & ~timeline.program.joined[earlier]
        gap_s = (timeline.start_s[later] - timeline.end_s[earlier]) / (later - earlier)
        gaps_s.append(gap_s[is_free])
    return _median(np.concatenate(gaps_s))


def _latency_s(timeline: Timeline, before: NDArray[np.int32]) -> float:
    """Seconds from the end of a send to the arrival, over the messages whose receiver was idle when they left."""
    program = timeline.program
    is_receive = np.isin(program.op, RECEIVES)
    consumers = np.flatnonzero((before != NONE) & is_receive[before])
    receives = before[consumers]
    sends = before[receives]
    # The row before a consumer is of the same rank: at the earliest it is the receive itself. A receive is over for
    # its rank once it is posted; its end is the arrival.
    last = consumers - 1
    idle_from_s = np.where(is_receive[last], timeline.start_s[last], timeline.end_s[last])
    is_awaited = (sends != NONE) & (idle_from_s < timeline.end_s[sends])
    return _median((timeline.end_s[receives] - timeline.end_s[sends])[is_awaited])


def _median(values_s: NDArray[np.float64]) -> float:
    return max(float(np.median(values_s)), 0.0) if len(values_s) else 0.0
