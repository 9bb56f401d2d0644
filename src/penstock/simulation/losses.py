"""What each cause costs a measured step: by how much the step would be shorter without it, and who is to blame.

Inside the step each cause is taken out of the costs, and the step simulated again. Launches and messages are taken out
together, and share what that saves as they share the idle time:

    predicted      [==========================]
    even stages    [====================]           the difference is what imbalance costs
    measured       [================================]   what is above the prediction took longer than usual

Waits for data, and reductions that hold their rank up, are no costs: the measured step is laid out again without them.
Before the step, the last rank to come is let come as early as it could have.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.operations import Kind
from penstock.ir.program import Program
from penstock.ir.timeline import Timeline
from penstock.simulation.blocks import blocks_of
from penstock.simulation.causes import Cause, idle_times, late_starts_s
from penstock.simulation.costs.costs import FIELD_OF_KIND, Costs
from penstock.simulation.costs.messages import hops, message_costs
from penstock.simulation.engine import simulate
from penstock.simulation.expected import ExpectedDurations
from penstock.simulation.prologue import Prologue, last_to_ask, with_first_waits
from penstock.simulation.without_waits import makespan_without_waits_s


@dataclass(frozen=True, slots=True)
class Loss:
    """One cause, and what it costs the whole step."""

    cause: Cause
    duration_s: float
    culprit: str
    """What would have to change: a stage, a channel, a rank; empty where it is no single one."""


def losses_of(timeline: Timeline, costs: Costs, prologues: Sequence[Prologue] = ()) -> list[Loss]:
    """List what every cause costs a measured timeline, the dearest first; `costs` are what is usual for it.

    They need not add up to the idle time of any rank: two causes may delay the same second.
    """
    program = timeline.program
    prologues = with_first_waits(timeline, prologues)
    predicted_s = simulate(program, costs).makespan_s
    without_data_waits_s = makespan_without_waits_s(timeline, range(timeline.num_ranks))
    without_waits_s = makespan_without_waits_s(timeline, range(timeline.num_ranks), is_reducing=False)

    def without(other: Costs) -> float:
        return max(predicted_s - simulate(program, other).makespan_s, 0.0)

    even = evened(costs, program.num_stages)
    free = replace(costs, latency_s=0.0, bandwidth_bytes_per_s=inf, channels=())
    ideal = replace(even, latency_s=0.0, bandwidth_bytes_per_s=inf, channels=(), launch_s=0.0, reduce_s=(0.0,))
    in_messages = _share_of_messages(timeline, costs)
    host_and_messages_s = without(replace(free, launch_s=0.0))
    # Gathers may wait for reductions beside their rank; others hold it up.
    reductions_s = without(replace(costs, reduce_s=(0.0,))) + without_data_waits_s - without_waits_s
    found = [
        Loss(Cause.DEPENDENCY, _bubble_s(simulate(program, ideal)), program.name),
        Loss(Cause.TRANSFER, in_messages * host_and_messages_s, _slowest_channel(program, costs)),
        Loss(Cause.IMBALANCE, without(even), _heaviest_stage(program, costs)),
        Loss(Cause.LAUNCH, (1 - in_messages) * host_and_messages_s, ""),
        _straggler(timeline, costs, max(without_waits_s - predicted_s, 0.0), prologues),
        _data(timeline, timeline.makespan_s - without_data_waits_s, prologues),
        Loss(Cause.SYNCHRONISATION, _agreement_s(timeline, prologues) + reductions_s, ""),
    ]
    return sorted(found, key=lambda loss: -loss.duration_s)


def _share_of_messages(timeline: Timeline, costs: Costs) -> float:
    """Of the idle time in which messages were on their way or the host launched, the share of the former.

    Costs cannot tell both apart: where a launch takes longer than a message, the fitted latency is 0, and all that
    messages take is launch time of their sends and receives.
    """
    idle = idle_times(timeline, costs)
    messages_s, launches_s = idle.total(Cause.TRANSFER), idle.total(Cause.LAUNCH)
    return messages_s / (messages_s + launches_s) if messages_s else 0.0


def evened(costs: Costs, num_stages: int) -> Costs:
    """Return costs in which every stage takes as long as the mean one."""
    means = np.nan_to_num(costs.durations_s(num_stages)).mean(axis=1)
    prepared = costs.per_stage("split_forward_s", num_stages).mean() if costs.split_forward_s else None
    known: dict[str, Any] = {
        name: (float(means[kind]),) for kind, name in FIELD_OF_KIND.items() if getattr(costs, name)
    }
    return replace(costs, **known, split_forward_s=() if prepared is None else (float(prepared),))


def _bubble_s(timeline: Timeline) -> float:
    """Idle seconds of the mean rank."""
    return max(timeline.makespan_s - float(timeline.work_s.mean()), 0.0)


def _heaviest_stage(program: Program, costs: Costs) -> str:
    table = costs.durations_s(program.num_stages)
    runs = [kind for kind in Kind if (program.op == kind).any()]
    totals = np.nan_to_num(table[runs]).sum(axis=0)
    stage = int(totals.argmax())
    mean_s = float(totals.mean())
    if mean_s == 0:
        return ""
    return (
        f"stage {stage} on rank {program.placement.rank_of_stage[stage]}, {totals[stage] / mean_s:.2f} times the mean"
    )


def _slowest_channel(program: Program, costs: Costs) -> str:
    table, ranks = message_costs(program.placement, costs), program.placement.rank_of_stage
    trip_s: dict[tuple[int, int], float] = {}
    for direction, stage, neighbour in hops(program.placement):
        pair = (ranks[stage], ranks[neighbour])
        seconds = float(table.latency_s[direction, stage] + table.wire_s[direction, stage]) + costs.launch_s
        trip_s[pair] = max(trip_s.get(pair, 0.0), seconds)
    if not trip_s:
        return ""
    (sender, receiver), seconds = max(trip_s.items(), key=lambda item: item[1])
    return f"rank {sender} to rank {receiver}, {seconds * 1e3:.3g} ms a message"


def _straggler(timeline: Timeline, costs: Costs, inside_s: float, prologues: Sequence[Prologue]) -> Loss:
    """What was slower than usual within the step, and what a rank did before it that was not its batch."""
    late_s = _late_s(prologues)
    before_s = _saved_before_s(prologues, late_s)
    if before_s > inside_s:
        return Loss(Cause.STRAGGLER, inside_s + before_s, f"rank {last_to_ask(prologues)}, late for the step")
    excess_s, begins_late_s = excess_of_ranks_s(timeline, costs), late_starts_s(timeline, costs)
    rank = int((excess_s + begins_late_s).argmax())
    is_slow = excess_s[rank] >= begins_late_s[rank]
    how = "slower than it usually is" if is_slow else "which begins later than it could"
    return Loss(Cause.STRAGGLER, inside_s + before_s, f"rank {rank}, {how}")


def excess_of_ranks_s(timeline: Timeline, costs: Costs) -> NDArray[np.float64]:
    """[num_ranks] seconds by which computations took longer than they usually do."""
    expected = ExpectedDurations(timeline.program, costs)
    found = np.zeros(timeline.num_ranks)
    for block in blocks_of(timeline):
        found[block.rank] += max(block.end_s - block.start_s - expected.on_its_stage_s(block), 0.0)
    return found


def _data(timeline: Timeline, inside_s: float, prologues: Sequence[Prologue]) -> Loss:
    """What ranks waited for before the step, and for single microbatches within it."""
    before_s = _saved_before_s(prologues, [prologue.data_s for prologue in prologues])
    if inside_s > before_s:
        without_s = [makespan_without_waits_s(timeline, [rank]) for rank in range(timeline.num_ranks)]
        rank = without_s.index(min(without_s))
        return Loss(Cause.DATA, before_s + inside_s, f"rank {rank}, for microbatches within the step")
    return Loss(Cause.DATA, before_s + inside_s, f"rank {last_to_ask(prologues)}" if prologues else "")


def _agreement_s(timeline: Timeline, prologues: Sequence[Prologue]) -> float:
    """From when all had asked for the step to its first computation."""
    asked_s = max((prologue.asked_s for prologue in prologues), default=inf)
    return max(float(timeline.start_s[timeline.program.is_compute].min(initial=inf)) - asked_s, 0.0)


def _late_s(prologues: Sequence[Prologue]) -> list[float]:
    """Per rank, how much later than the quickest it was free, and how much longer it took from batch to step."""
    first_s = min((prologue.free_s for prologue in prologues), default=0.0)
    usual_s = min((prologue.asked_s - prologue.loaded_s for prologue in prologues), default=0.0)
    return [each.free_s - first_s + each.asked_s - each.loaded_s - usual_s for each in prologues]


def _saved_before_s(prologues: Sequence[Prologue], without_s: Sequence[float]) -> float:
    """By how much sooner the last rank asks if each does so many seconds less."""
    if not prologues:
        return 0.0
    asked_s = [prologue.asked_s for prologue in prologues]
    return max(asked_s) - max(asked - saved for asked, saved in zip(asked_s, without_s, strict=True))
