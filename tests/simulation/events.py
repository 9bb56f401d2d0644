"""A second simulator, and random programs and costs for it: goes from moment to moment and starts whatever can start.

It has no walk, no tables and no queues; it is slow, and follows the words of docs/simulator.md one by one.
"""

from heapq import heappop, heappush
from itertools import pairwise
from math import inf

import numpy as np
from hypothesis import strategies as st

from penstock.ir.action import Action
from penstock.ir.instruction import Op
from penstock.ir.operations import IS_COMPUTE, Kind
from penstock.ir.program import NewRows
from penstock.lowering import lower
from penstock.simulation import Costs
from penstock.simulation.costs.costs import Channel
from tests.support.strategies import feasible_schedules, needs, one_of_each_rank

RECEIVES = (Op.RECEIVE_FORWARD, Op.RECEIVE_BACKWARD)
KINDS = ("forward_s", "backward_s", "backward_input_s", "backward_weight_s")
REDUCTIONS = (Op.REDUCE_GRADIENT, Op.REDUCE_TIED)
SECONDS_BESIDE = {
    Op.UNSHARD: "unshard_s",
    Op.REDUCE_GRADIENT: "reduce_s",
    Op.OFFLOAD: "offload_s",
    Op.RELOAD: "reload_s",
}
QUEUES = ((Op.UNSHARD, Op.REDUCE_GRADIENT), (Op.OFFLOAD, Op.RELOAD))
"""Of each rank."""


def entry(entries, index):
    return entries[index] if len(entries) > 1 else entries[0]


class Events:
    """Simulates one program under costs."""

    def __init__(self, program, costs):
        self.program, self.costs, self.rank_of_stage = program, costs, program.placement.rank_of_stage
        self.gradient = Kind.BACKWARD if Kind.BACKWARD in program.op else Kind.BACKWARD_INPUT
        self.waiting = [list(range(first, last)) for first, last in pairwise(program.offsets)]
        self.free_s = [0.0] * program.num_ranks
        self.known_s, self.channel_free_s = {}, {}  # (action, rank that has its result), (sender, receiver)
        self.start_s, self.end_s = np.full((2, program.num_instructions), np.nan)
        # By sending and receiving rank: (row, when it can leave) of what waits, and when receives were posted.
        self.waiting_sends, self.posts_s = {}, {}
        self.moments = [0.0]
        # By rank and queue: what it has launched and not begun, and when it is free; and the rows of tied groups.
        self.launched = {(rank, queue): [] for rank in range(program.num_ranks) for queue in QUEUES}
        self.queue_free_s = dict.fromkeys(self.launched, 0.0)
        self.of_group = {}
        for row in np.flatnonzero(program.op == Op.REDUCE_TIED).tolist():
            self.of_group.setdefault(int(program.peer[row]), {})[int(program.rank_of_row[row])] = row
        self.loaded = set()
        self.barriers = [np.flatnonzero(program.op[a:b] == Op.BARRIER) + a for a, b in pairwise(program.offsets)]

    def times(self):
        while self.moments:
            now, progress = heappop(self.moments), True
            while progress:
                progress = any(self.starts_something(rank, now) for rank in range(self.program.num_ranks))
                progress |= any(self.begins_launched(queue, now) for queue in self.launched)
        for row in np.flatnonzero(np.isin(self.program.op, RECEIVES)):
            made, rank = self.result_at(row, "peer"), self.program.rank_of_row[row]
            self.end_s[row] = max(self.end_s[row], self.known_s[made, rank])
        return self.start_s.tolist(), self.end_s.tolist()

    def starts_something(self, rank, now):
        waiting = self.waiting[rank]
        if not waiting or self.free_s[rank] > now:
            return False
        rows = [waiting[0], waiting[0] + 1] if self.program.joined[waiting[0]] else [waiting[0]]
        computes = [self.result_at(row) for row in rows if IS_COMPUTE[self.program.op[row]]]
        wanted = [need for action in computes for need in needs(action, self.program)]
        if any(self.known_s.get((need, rank), inf) > now for need in wanted) or self.waits_for_others(rows, now):
            return False
        launches_s, op = len(rows) * self.costs.launch_s, self.program.op[rows[0]]
        came_s = self.comes_s(rank, rows[0]) if op in (Op.REDUCE_TIED, Op.BARRIER) else now
        is_launched = computes or op in (*REDUCTIONS, Op.OPTIMIZER_STEP, Op.BARRIER)
        self.start_s[rows] = came_s + launches_s if is_launched else now
        until = now + launches_s + self.work_s(rows[0], computes, rank)
        self.end_s[rows] = self.free_s[rank] = until
        self.known_s.update({(action, rank): until for action in computes})
        heappush(self.moments, until)
        if self.program.instruction(waiting[0]).op.is_send:
            receiver = self.rank_of_stage[self.program.peer[waiting[0]]]
            self.waiting_sends.setdefault((rank, receiver), []).append((waiting[0], until))
            self.send_posted(rank, receiver)
        if op in RECEIVES:
            sender = self.rank_of_stage[self.program.peer[waiting[0]]]
            self.posts_s.setdefault((sender, rank), []).append(until)
            self.send_posted(sender, rank)
        if op in SECONDS_BESIDE and any(getattr(self.costs, SECONDS_BESIDE[op])):
            self.end_s[rows] = np.nan
            queue = next(queue for queue in QUEUES if op in queue)
            self.launched[rank, queue].append((rows[0], until))
        self.waiting[rank] = waiting[len(rows) :]
        return True

    def work_s(self, row, computes, rank):
        if self.program.op[row] == Op.OPTIMIZER_STEP:
            return sum(entry(self.costs.optimizer_s, s) for s in self.program.placement.stages_of_rank[rank])
        if self.program.op[row] == Op.REDUCE_TIED:
            return entry(self.costs.tied_reduce_s, self.program.peer[row])
        if self.program.op[row] == Op.LOAD:
            place = rank, int(self.program.microbatch[row])
            is_loaded = place in self.loaded
            self.loaded.add(place)
            return 0.0 if is_loaded else entry(self.costs.load_s, self.program.stage[row])
        factor = self.costs.overlap_factor if len(computes) == 2 else 1.0
        return factor * sum(
            entry(getattr(self.costs, KINDS[action.kind]), action.stage)
            * entry(self.costs.microbatch_compute_factor, action.microbatch)
            for action in computes
        )

    def waits_for_others(self, rows, now):
        """A computation waits for the gathers of its stage and its reload, a tied reduction for its group.

        It and the optimizer step wait for the reductions of their rank.
        """
        if self.program.op[rows[0]] == Op.REDUCE_TIED:
            members = self.of_group[self.program.peer[rows[0]]]
            return not all(self.has_come(rank, row, now) for rank, row in members.items())
        if self.program.op[rows[0]] == Op.BARRIER:
            number = self.barriers[self.program.rank_of_row[rows[0]]].tolist().index(rows[0])
            return not all(self.has_come(rank, of_rank[number], now) for rank, of_rank in enumerate(self.barriers))
        if self.program.op[rows[0]] == Op.OPTIMIZER_STEP:
            return not self.comes_s(self.program.rank_of_row[rows[0]], rows[0]) <= now
        return any(self.waits_for_launched(row, now) for row in rows if IS_COMPUTE[self.program.op[row]])

    def has_come(self, rank, row, now):
        is_next = self.waiting[rank][:1] == [row]
        return row not in self.waiting[rank] or (is_next and self.comes_s(rank, row) <= now)

    def comes_s(self, rank, row):
        """When a rank is free for the row, and the reductions before it are over; NaN while that is not known.

        A barrier does not wait for reductions.
        """
        if self.program.op[row] == Op.BARRIER:
            return self.free_s[rank]
        before = range(self.program.offsets[rank], row)
        ends = [self.end_s[other] for other in before if self.program.op[other] == Op.REDUCE_GRADIENT]
        return np.max([self.free_s[rank], *ends])

    def copies(self, stage):
        """The stages that are the same module: those on its rank at its place in their routes."""
        routes, rank = self.program.placement.routes, self.rank_of_stage[stage]
        place = next(route.index(stage) for route in routes if stage in route)
        return [route[place] for route in routes if self.rank_of_stage[route[place]] == rank]

    def waits_for_launched(self, row, now):
        columns = [getattr(self.program, name) for name in ("stage", "microbatch", "slice")]
        copies = self.copies(self.program.stage[row])
        for other in range(self.program.offsets[self.program.rank_of_row[row]], row):
            is_awaited = {
                Op.UNSHARD: self.program.stage[other] in copies,
                Op.RELOAD: all(column[other] == column[row] for column in columns),
            }.get(self.program.op[other], False)
            if is_awaited and not self.end_s[other] <= now:
                return True
        return False

    def begins_launched(self, queue, now):
        if not self.launched[queue] or max(self.launched[queue][0][1], self.queue_free_s[queue]) > now:
            return False
        row, _ = self.launched[queue].pop(0)
        op, stage = self.program.op[row], self.program.stage[row]
        copies = self.copies(stage)
        if op in QUEUES[0] and np.isin(self.program.stage[self.program.op == Op.UNSHARD], copies).any():
            stage = copies[-1]  # copies that are gathered have the costs of the last one
        seconds = getattr(self.costs, SECONDS_BESIDE[op])
        self.end_s[row] = self.queue_free_s[queue] = now + entry(seconds, stage)
        heappush(self.moments, self.end_s[row])
        return True

    def send_posted(self, sender, receiver):
        """Send what has been waiting for nothing, or for its receive alone: the n-th send belongs to the n-th one."""
        waiting, posts_s = self.waiting_sends.get((sender, receiver), []), self.posts_s.get((sender, receiver), [])
        while waiting and (posts_s or not self.costs.awaits_receives):
            row, ready_s = waiting.pop(0)
            begin_s = max(ready_s, posts_s.pop(0)) if self.costs.awaits_receives else ready_s
            left_s = self.send(row, sender, begin_s)
            if self.channel(sender, receiver).is_exclusive:
                self.end_s[row] = left_s

    def send(self, row, rank, now):
        """Put the message on its way; return when it has left."""
        made, receiver = self.result_at(row), self.rank_of_stage[self.program.peer[row]]
        output_of = made.stage if made.kind is Kind.FORWARD else self.program.peer[row]
        channel = self.channel(rank, receiver)
        num_bytes = entry(self.costs.message_bytes, output_of)
        num_bytes *= entry(self.costs.microbatch_bytes_factor, made.microbatch)
        wire_s = num_bytes / channel.bandwidth_bytes_per_s
        begin_s = max(now, self.channel_free_s.get((rank, receiver), 0.0)) if channel.is_exclusive else now
        self.channel_free_s[rank, receiver] = begin_s + wire_s
        self.known_s[made, receiver] = begin_s + wire_s + channel.latency_s
        heappush(self.moments, self.known_s[made, receiver])
        return begin_s + wire_s

    def channel(self, sender, receiver):
        for channel in self.costs.channels:
            if (channel.sender, channel.receiver) == (sender, receiver):
                return channel
        costs = self.costs
        return Channel(sender, receiver, costs.latency_s, costs.bandwidth_bytes_per_s, costs.is_exclusive)

    def result_at(self, row, stage="stage"):
        """The action that this row is, or whose result it sends or, from its peer, receives."""
        op = Op(self.program.op[row])
        kind = Kind(op) if op.is_compute else (Kind.FORWARD if "FORWARD" in op.name else self.gradient)
        return Action(kind, *(int(getattr(self.program, name)[row]) for name in (stage, "microbatch", "slice")))


def uneven_costs(program, seed):
    """Multiples of a quarter, some of them 0, different everywhere: sums of them are exact, whatever their order."""
    chance = np.random.default_rng(seed)
    num_ranks, num_stages, num_microbatches = program.num_ranks, program.num_stages, program.num_microbatches

    def quarters(high, count):
        return tuple((chance.integers(0, high, count) / 4).tolist())

    pairs = [(a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b and chance.random() < 0.3]
    return Costs(
        **{kind: quarters(12, num_stages) for kind in KINDS},
        overlap_factor=float(chance.choice([0.5, 0.75, 1.0])),
        microbatch_compute_factor=tuple(chance.choice([0.5, 1.0, 2.0], num_microbatches).tolist()),
        optimizer_s=quarters(8, num_stages),
        unshard_s=quarters(8, num_stages),
        reduce_s=quarters(8, num_stages) if chance.random() < 0.7 else (0.0,),
        tied_reduce_s=quarters(8, 1),
        latency_s=quarters(5, 1)[0],
        bandwidth_bytes_per_s=8.0,
        is_exclusive=bool(chance.random() < 0.5),
        channels=tuple(
            Channel(*pair, quarters(5, 1)[0], float(chance.choice([2, 4, 16])), bool(chance.random() < 0.5))
            for pair in pairs
        ),
        message_bytes=tuple(chance.integers(0, 33, num_stages).tolist()),
        microbatch_bytes_factor=tuple(chance.choice([0.5, 1.0, 2.0], num_microbatches).tolist()),
        launch_s=float(chance.integers(0, 3)) / 16,
        offload_s=quarters(8, num_stages),
        reload_s=quarters(8, num_stages),
        load_s=quarters(4, num_stages),
    )


@st.composite
def programs(draw):
    """Lowered random schedules with tied stages, an optimizer step, offloads, and stages gathered at random.

    Some have loads, and some barriers.
    """
    schedule = draw(feasible_schedules())
    stages = st.sets(st.integers(0, schedule.num_stages - 1), min_size=1)
    groups = [one_of_each_rank(schedule.placement, group) for group in draw(st.lists(stages, max_size=2))]
    offload = [] if schedule.is_forward_only else draw(st.sets(st.integers(0, schedule.num_stages - 1)))
    chosen = {name: draw(st.booleans()) for name in ("optimizer_step", "loads", "barriers")}
    program = lower(schedule, tied_groups=groups, offload=offload, **chosen)
    return program if draw(st.booleans()) else with_sharding(program, draw(st.integers(0, 2**32)))


def with_sharding(program, seed):
    """Put some UNSHARD and RESHARD before computations of their stages' ranks, also where they make little sense."""
    chance = np.random.default_rng(seed)
    stages, rows = [], []
    for stage, rank in enumerate(program.placement.rank_of_stage):
        own = [row for row in range(*program.offsets[rank : rank + 2]) if row == program.offsets[rank] or not
               program.joined[row - 1]]  # fmt: skip
        chosen = [row for row in own if program.op[row] < Op.REDUCE_GRADIENT and chance.random() < 0.2]
        rows += chosen
        stages += [stage] * len(chosen)
    rows, stages = np.array(rows, np.int64), np.array(stages, np.int32)
    ranks, zeros = program.rank_of_row[rows], np.zeros_like(stages)
    ops = chance.choice([Op.UNSHARD, Op.UNSHARD, Op.RESHARD], len(rows))
    return program.inserted(NewRows(NewRows.before(rows), ranks, ops, stages, zeros, zeros, stages))
