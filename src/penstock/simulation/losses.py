"""The cost of each cause in a measured step: how much shorter the step would be without it, and who is to blame.

Inside the step each cause is taken out of the costs, and the step simulated again. Launches and messages are taken out
together, and share what that saves as they share the idle time:

    predicted      [==========================]
    even stages    [====================]           the difference is what imbalance costs
    measured       [================================]   what is above the prediction took longer than usual

Waits for data, and reductions that hold their rank up, are no costs: the measured step is laid out again without them.
Before the step, the last rank to come is let come as early as it could have. In the step that is laid out again, blocks
are as long as they were, and come after what they need:

    measured       [F0] |data of 1 ~~~~~~~| [F1]          |  is a pause, as long as it was
    without        [F0] || [F1]                           and what waits for F1 begins earlier as well
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np

from penstock.ir.measured import Prologue
from penstock.ir.operations import Kind
from penstock.ir.program import Program
from penstock.ir.timeline import DataWait, Timeline
from penstock.simulation.blocks import Block, Collective, blocks_of, in_order
from penstock.simulation.causes import Cause, IdleTimes, RankAccount, accounts_of
from penstock.simulation.costs.costs import FIELD_OF_KIND, Costs
from penstock.simulation.costs.messages import hops, message_costs
from penstock.simulation.engine import simulate
from penstock.simulation.message_latency import with_true_arrivals
from penstock.simulation.prologue import last_to_ask, with_first_waits


@dataclass(frozen=True, slots=True)
class Loss:
    """One cause, and what it costs the whole step."""

    cause: Cause
    duration_s: float
    culprit: str
    """The part that would have to change: a stage, a channel, a rank; empty where it is no single one."""


def losses_of(timeline: Timeline, costs: Costs, prologues: Sequence[Prologue] = ()) -> list[Loss]:
    """List what every cause costs a measured timeline, the most expensive first; `costs` are what is usual for it.

    They need not add up to the idle time of any rank: two causes may delay the same second.
    """
    program, accounts = timeline.program, accounts_of(timeline, costs)
    prologues = with_first_waits(timeline, prologues)
    predicted_s = simulate(program, costs).makespan_s
    without_data_waits_s = makespan_without_waits_s(timeline, range(timeline.num_ranks))
    without_waits_s = makespan_without_waits_s(timeline, range(timeline.num_ranks), is_reducing=False)

    def without(other: Costs) -> float:
        return max(predicted_s - simulate(program, other).makespan_s, 0.0)

    even = evened(costs, program.num_stages)
    free = replace(costs, latency_s=0.0, bandwidth_bytes_per_s=inf, channels=())
    ideal = simulate(program, replace(evened(free, program.num_stages), launch_s=0.0, reduce_s=(0.0,)))
    in_messages = _share_of_messages(accounts)
    host_and_messages_s = without(replace(free, launch_s=0.0))
    # Gathers may wait for reductions beside their rank; others hold it up.
    reductions_s = without(replace(costs, reduce_s=(0.0,))) + without_data_waits_s - without_waits_s
    found = [
        Loss(Cause.DEPENDENCY, max(ideal.makespan_s - float(ideal.work_s.mean()), 0.0), program.name),
        Loss(Cause.TRANSFER, in_messages * host_and_messages_s, _slowest_channel(program, costs)),
        Loss(Cause.IMBALANCE, without(even), _heaviest_stage(program, costs)),
        Loss(Cause.LAUNCH, (1 - in_messages) * host_and_messages_s, ""),
        _straggler(accounts, max(without_waits_s - predicted_s, 0.0), prologues),
        _data(timeline, timeline.makespan_s - without_data_waits_s, prologues),
        Loss(Cause.SYNCHRONISATION, _agreement_s(timeline, prologues) + reductions_s, ""),
        Loss(Cause.MEMORY, 0.0, ""),  # without a limit, the same order takes as long
    ]
    return sorted(found, key=lambda loss: -loss.duration_s)


def _share_of_messages(accounts: Sequence[RankAccount]) -> float:
    """Of the idle time in which messages were on their way or the host launched, the share of the former.

    Costs cannot tell both apart: where a launch takes longer than a message, the fitted latency is 0, and all that
    messages take is launch time of their sends and receives.
    """
    idle = IdleTimes.of(accounts)
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


def _straggler(accounts: Sequence[RankAccount], inside_s: float, prologues: Sequence[Prologue]) -> Loss:
    """Work that was slower than usual within the step, and the time of a rank before it that was not its batch's."""
    late_s = _late_s(prologues)
    before_s = _saved_before_s(prologues, late_s)
    if before_s > inside_s:
        return Loss(Cause.STRAGGLER, inside_s + before_s, f"rank {last_to_ask(prologues)}, late for the step")
    rank = int(np.argmax([account.excess_s + account.late_s for account in accounts]))
    is_slow = accounts[rank].excess_s >= accounts[rank].late_s
    how = "slower than it usually is" if is_slow else "which begins later than it could"
    return Loss(Cause.STRAGGLER, inside_s + before_s, f"rank {rank}, {how}")


def _data(timeline: Timeline, inside_s: float, prologues: Sequence[Prologue]) -> Loss:
    """Waits for the batch before the step, and for single microbatches within it."""
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


def makespan_without_waits_s(timeline: Timeline, ranks: Collection[int], *, is_reducing: bool = True) -> float:
    """Return the seconds from the first start to the last end if these ranks had not waited for data.

    And, unless `is_reducing`, if no reduction had held up any rank.
    """
    blocks = blocks_of(with_true_arrivals(timeline, after_posts=False))
    begin_s = min((block.start_s for block in blocks), default=0.0)
    free_s = dict.fromkeys(range(timeline.num_ranks), begin_s)
    # How much earlier than measured each block would be over, and of each rank the one before.
    earlier_s = [0.0] * len(blocks)
    gained_s = dict.fromkeys(range(timeline.num_ranks), 0.0)
    for index in in_order(blocks, timeline.num_ranks):
        block = blocks[index]
        rank = block.rank
        left: list[DataWait | Collective] = []
        taken_out: list[DataWait | Collective] = []
        (taken_out if rank in ranks else left).extend(block.data_waits)
        (left if is_reducing else taken_out).extend(block.reductions)
        ready = _ready(block, free_s[rank], gained_s[rank], earlier_s)
        ready += [(min(wait.end_s, block.start_s), gained_s[rank]) for wait in left]
        measured_s = max(moment_s for moment_s, _ in ready)
        instead_s = max(moment_s - gain_s for moment_s, gain_s in ready)
        waited_s = _seconds_between(measured_s, block.start_s, taken_out)
        earlier_s[index] = gained_s[rank] = measured_s - instead_s + waited_s
        free_s[rank] = block.end_s
    last_s = max((block.end_s - gain_s for block, gain_s in zip(blocks, earlier_s, strict=True)), default=0.0)
    return last_s - begin_s


def _ready(block: Block, free_s: float, gained_s: float, earlier_s: list[float]) -> list[tuple[float, float]]:
    """The moments after which a block begins, each with how much earlier it would be."""
    found = [(free_s, gained_s)]
    found += [(message.arrival_s, earlier_s[message.producer]) for message in block.messages]
    if block.gather is not None:
        found.append((block.gather.end_s, gained_s))
    return found


def _seconds_between(begin_s: float, end_s: float, waits: Collection[DataWait | Collective]) -> float:
    """How long any of the waits lasted between two moments."""
    found_s = 0.0
    for wait in sorted(waits, key=lambda wait: wait.begin_s):
        found_s += max(min(wait.end_s, end_s) - max(wait.begin_s, begin_s), 0.0)
        begin_s = max(begin_s, wait.end_s)
    return found_s
