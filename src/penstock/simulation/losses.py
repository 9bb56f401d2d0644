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
from itertools import islice
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.awaits import num_barriers_before
from penstock.ir.collectives import IS_BARRIER
from penstock.ir.measured import Prologue
from penstock.ir.operations import Kind
from penstock.ir.program import Program
from penstock.ir.timeline import DataWait, Timeline
from penstock.simulation.blocks import Block, Collective, blocks_of, in_order, waits_of_ranks
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
    """Return the seconds that every cause costs a measured step, the most expensive first.

    `costs` are the usual costs of the same step, by which it is predicted. For most causes, the prediction is compared
    with one in which that cause costs nothing. `prologues` are what each rank did before its first instruction. Losses
    need not add up to the idle time of any rank: two causes may delay the same second.
    """
    program, accounts = timeline.program, accounts_of(timeline, costs)
    prologues = with_first_waits(timeline, prologues)
    predicted_s = simulate(program, costs).makespan_s
    without_data_waits_s = makespan_without_waits_s(timeline, range(timeline.num_ranks))
    without_waits_s = makespan_without_waits_s(timeline, range(timeline.num_ranks), is_reducing=False)

    def saved_s(cheaper_costs: Costs) -> float:
        return max(predicted_s - simulate(program, cheaper_costs).makespan_s, 0.0)

    even_costs = evened(costs, program.num_stages)
    free_messages = replace(costs, latency_s=0.0, bandwidth_bytes_per_s=inf, channels=())
    ideal_timeline = simulate(
        program, replace(evened(free_messages, program.num_stages), launch_s=0.0, reduce_s=(0.0,))
    )
    # Fitted costs cannot tell messages and launches apart, so both are made free at once, and the time saved is divided
    # by the shares of idle time that each caused.
    share_of_messages = _share_of_messages(accounts)
    host_and_messages_s = saved_s(replace(free_messages, launch_s=0.0))
    # Reductions that run beside their rank delay gathers, which the simulation shows. Those that hold their rank up are
    # shown by the measured step, laid out again without waits.
    reductions_s = saved_s(replace(costs, reduce_s=(0.0,))) + without_data_waits_s - without_waits_s
    losses = [
        Loss(Cause.DEPENDENCY, max(ideal_timeline.makespan_s - float(ideal_timeline.work_s.mean()), 0.0), program.name),
        Loss(Cause.TRANSFER, share_of_messages * host_and_messages_s, _slowest_channel(program, costs)),
        Loss(Cause.IMBALANCE, saved_s(even_costs), _heaviest_stage(program, costs)),
        Loss(Cause.LAUNCH, (1 - share_of_messages) * host_and_messages_s, ""),
        _straggler(accounts, max(without_waits_s - predicted_s, 0.0), prologues),
        _data(timeline, timeline.makespan_s - without_data_waits_s, prologues),
        Loss(Cause.SYNCHRONISATION, _agreement_s(timeline, prologues) + reductions_s, ""),
        Loss(Cause.MEMORY, 0.0, ""),  # without a limit, the same order takes as long
    ]
    return sorted(losses, key=lambda loss: -loss.duration_s)


def _share_of_messages(accounts: Sequence[RankAccount]) -> float:
    """Return the share of messages on their way in the idle time of both messages and launches of the host.

    Costs cannot tell both apart: where a launch takes longer than a message, the fitted latency is 0, and all that
    messages take is launch time of their sends and receives.
    """
    idle = IdleTimes.of(accounts)
    messages_s, launches_s = idle.total(Cause.TRANSFER), idle.total(Cause.LAUNCH)
    return messages_s / (messages_s + launches_s) if messages_s else 0.0


def evened(costs: Costs, num_stages: int) -> Costs:
    """Return costs in which every stage takes as long as the mean one."""
    means = np.nan_to_num(costs.durations_s(num_stages)).mean(axis=1)
    split_forward_s = costs.per_stage("split_forward_s", num_stages).mean() if costs.split_forward_s else None
    mean_of_field: dict[str, Any] = {
        name: (float(means[kind]),) for kind, name in FIELD_OF_KIND.items() if getattr(costs, name)
    }
    return replace(costs, **mean_of_field, split_forward_s=() if split_forward_s is None else (float(split_forward_s),))


def _heaviest_stage(program: Program, costs: Costs) -> str:
    """Return a text that names the stage whose actions take longest; empty where costs know no durations."""
    kinds = [kind for kind in Kind if (program.op == kind).any()]
    seconds_of_stage = np.nan_to_num(costs.durations_s(program.num_stages)[kinds]).sum(axis=0)
    stage = int(seconds_of_stage.argmax())
    mean_s = float(seconds_of_stage.mean())
    if mean_s == 0:
        return ""
    rank = program.placement.rank_of_stage[stage]
    return f"stage {stage} on rank {rank}, {seconds_of_stage[stage] / mean_s:.2f} times the mean"


def _slowest_channel(program: Program, costs: Costs) -> str:
    """Return a text that names the channel with the slowest message; empty where no rank sends one."""
    table, ranks = message_costs(program.placement, costs), program.placement.rank_of_stage
    slowest_s: dict[tuple[int, int], float] = {}
    for direction, stage, neighbour in hops(program.placement):
        channel = (ranks[stage], ranks[neighbour])
        seconds = float(table.latency_s[direction, stage] + table.wire_s[direction, stage]) + costs.launch_s
        slowest_s[channel] = max(slowest_s.get(channel, 0.0), seconds)
    if not slowest_s:
        return ""
    (sender, receiver), seconds = max(slowest_s.items(), key=lambda item: item[1])
    return f"rank {sender} to rank {receiver}, {seconds * 1e3:.3g} ms a message"


def _straggler(accounts: Sequence[RankAccount], inside_s: float, prologues: Sequence[Prologue]) -> Loss:
    """Return the loss by ranks that were slow: by work within the step, and before it by all but loading the batch.

    `inside_s` are the seconds lost within the step.
    """
    late_s = _late_s(prologues)
    before_s = _saved_before_s(prologues, late_s)
    if before_s > inside_s:
        return Loss(Cause.STRAGGLER, inside_s + before_s, f"rank {last_to_ask(prologues)}, late for the step")
    rank = int(np.argmax([account.excess_s + account.late_s for account in accounts]))
    is_slow = accounts[rank].excess_s >= accounts[rank].late_s
    how = "slower than it usually is" if is_slow else "which begins later than it could"
    return Loss(Cause.STRAGGLER, inside_s + before_s, f"rank {rank}, {how}")


def _data(timeline: Timeline, inside_s: float, prologues: Sequence[Prologue]) -> Loss:
    """Return the loss by waits for data: for the batch before the step, and `inside_s` for microbatches within it."""
    before_s = _saved_before_s(prologues, [prologue.data_s for prologue in prologues])
    if inside_s > before_s:
        without_s = [makespan_without_waits_s(timeline, [rank]) for rank in range(timeline.num_ranks)]
        rank = without_s.index(min(without_s))
        return Loss(Cause.DATA, before_s + inside_s, f"rank {rank}, for microbatches within the step")
    return Loss(Cause.DATA, before_s + inside_s, f"rank {last_to_ask(prologues)}" if prologues else "")


def _agreement_s(timeline: Timeline, prologues: Sequence[Prologue]) -> float:
    """Return the seconds from when all ranks had asked for the step to its first computation."""
    asked_s = max((prologue.asked_s for prologue in prologues), default=inf)
    return max(float(timeline.start_s[timeline.program.is_compute].min(initial=inf)) - asked_s, 0.0)


def _late_s(prologues: Sequence[Prologue]) -> list[float]:
    """Return for each rank the seconds that it lost against the quickest, without the loading of its batch.

    It lost them before it was free, and between having its batch and asking for the step.
    """
    first_s = min((prologue.free_s for prologue in prologues), default=0.0)
    usual_s = min((prologue.asked_s - prologue.loaded_s for prologue in prologues), default=0.0)
    return [prologue.free_s - first_s + prologue.asked_s - prologue.loaded_s - usual_s for prologue in prologues]


def _saved_before_s(prologues: Sequence[Prologue], avoidable_s: Sequence[float]) -> float:
    """Return by how many seconds the last rank asks sooner if each rank saves its `avoidable_s`."""
    if not prologues:
        return 0.0
    request_s = [prologue.asked_s for prologue in prologues]
    earliest_s = [moment_s - gain_s for moment_s, gain_s in zip(request_s, avoidable_s, strict=True)]
    return max(request_s) - max(earliest_s)


def makespan_without_waits_s(timeline: Timeline, ranks: Collection[int], *, is_reducing: bool = True) -> float:
    """Return the seconds of a measured step if `ranks` had not waited for data, from its first start to its last end.

    Unless `is_reducing`, no reduction of gradients and no barrier held up any rank either. A block is a computation or
    overlapped pair. Each block starts as long after the last moment that it needs (an arrival, the end of the block
    before) as it did in the measured step; only the moments come earlier.
    """
    blocks = blocks_of(with_true_arrivals(timeline, after_posts=False))
    barriers_before = num_barriers_before(timeline.program)
    num_barriers = barriers_before[[block.row for block in blocks]]
    first_start_s = min((block.start_s for block in blocks), default=0.0)
    free_s = dict.fromkeys(range(timeline.num_ranks), first_start_s)
    # Seconds by which each block, and the last block of each rank, would be over earlier than measured.
    gain_of_block_s = [0.0] * len(blocks)
    gain_of_rank_s = dict.fromkeys(range(timeline.num_ranks), 0.0)
    barriers = iter(timeline.program.rows_of(IS_BARRIER).reshape(timeline.num_ranks, -1).T if is_reducing else ())
    gain_of_barrier_s: list[float] = []
    # No message crosses a barrier, so blocks before it need none behind it.
    for index in sorted(in_order(blocks, timeline.num_ranks), key=num_barriers.__getitem__):
        for rows in islice(barriers, int(num_barriers[index]) - len(gain_of_barrier_s)):
            gain_of_barrier_s.append(_pass_barrier(timeline, rows, ranks, free_s, gain_of_rank_s))
        block = blocks[index]
        # A message that is sent behind a barrier behind its maker leaves when the barrier lets it.
        gains_of_messages_s = [
            gain_of_barrier_s[barriers_before[message.receive] - 1]
            if is_reducing and barriers_before[message.receive] > num_barriers[message.producer]
            else gain_of_block_s[message.producer]
            for message in block.messages
        ]
        rank = block.rank
        remaining_waits: list[DataWait | Collective] = []
        omitted_waits: list[DataWait | Collective] = []
        (omitted_waits if rank in ranks else remaining_waits).extend(block.data_waits)
        (remaining_waits if is_reducing else omitted_waits).extend(block.reductions)
        # A moment is a measured time that the block needs, with the seconds by which it would come earlier.
        moments = _moments_before(block, free_s[rank], gain_of_rank_s[rank], gains_of_messages_s)
        moments += [(min(wait.end_s, block.start_s), gain_of_rank_s[rank]) for wait in remaining_waits]
        measured_s = max(moment_s for moment_s, _ in moments)
        new_s = max(moment_s - gain_s for moment_s, gain_s in moments)
        # The pause between the last of these moments and the start stays as it was, but for waits that are left out.
        waited_s = _seconds_between(measured_s, block.start_s, omitted_waits)
        gain_of_block_s[index] = gain_of_rank_s[rank] = measured_s - new_s + waited_s
        free_s[rank] = block.end_s
    last_s = max((block.end_s - gain_s for block, gain_s in zip(blocks, gain_of_block_s, strict=True)), default=0.0)
    return last_s - first_start_s


def _pass_barrier(
    timeline: Timeline,
    rows: NDArray[np.intp],
    ranks: Collection[int],
    free_s: dict[int, float],
    gain_of_rank_s: dict[int, float],
) -> float:
    """Let all ranks leave a barrier when the last one has come to it; return by how many seconds it comes earlier.

    `rows` are those of the barrier, one per rank. `ranks` have not waited for data; `free_s` and `gain_of_rank_s` are
    those of the ranks before the barrier, and afterwards those behind it.
    """
    arrivals_s: list[float] = timeline.start_s[rows].tolist()
    data_waits = waits_of_ranks(timeline)
    new_arrivals_s = [
        arrival_s
        - gain_of_rank_s[rank]
        - (_seconds_between(free_s[rank], arrival_s, data_waits[rank]) if rank in ranks else 0.0)
        for rank, arrival_s in enumerate(arrivals_s)
    ]
    gain_s = max(arrivals_s) - max(new_arrivals_s)
    for rank, end_s in enumerate(timeline.end_s[rows].tolist()):
        free_s[rank], gain_of_rank_s[rank] = end_s, gain_s
    return gain_s


def _moments_before(
    block: Block, free_s: float, gain_of_rank_s: float, gains_of_messages_s: Sequence[float]
) -> list[tuple[float, float]]:
    """Return the moments after which a block can begin, each with the seconds by which it would be earlier.

    They are when its rank is free, when each message has arrived, and when its gather is over.
    """
    moments = [(free_s, gain_of_rank_s)]
    moments += [
        (message.arrival_s, gain_s) for message, gain_s in zip(block.messages, gains_of_messages_s, strict=True)
    ]
    if block.gather is not None:
        moments.append((block.gather.end_s, gain_of_rank_s))
    return moments


def _seconds_between(begin_s: float, end_s: float, waits: Collection[DataWait | Collective]) -> float:
    """Return for how many seconds between two moments any of the waits lasted."""
    total_s = 0.0
    for wait in sorted(waits, key=lambda wait: wait.begin_s):
        total_s += max(min(wait.end_s, end_s) - max(wait.begin_s, begin_s), 0.0)
        begin_s = max(begin_s, wait.end_s)
    return total_s
