"""Why ranks were idle: every idle second of a timeline, by its cause.

An idle second of a rank is put down to what the rank that it waits for was doing in that second:

    rank 0   F0  F1  .   .   .   .   B0
    rank 1   .   F0  ------ B0 --->  F1
             [1]     [2]  [3]    [4]

[1] rank 0 computes what rank 1 waits for: the order of the schedule wants it so, a *dependency*. [2] Such a computation
may take longer than the mean stage: what is above the mean is *imbalance*. [3] It may take longer than it usually does:
a *straggler*. [4] The message is on its way: a *transfer*. Where the other rank is idle itself, its cause is inherited.
Where a forward was ready and only the limit of activations kept the rank from running it, that limit is the cause.
Where all that comes from elsewhere was there, and the rank waited for the data of a microbatch, the *data* are.
So each second has one cause, and the causes of a rank add up to its idle time.

The limit of activations blocks a rank that holds as many as allowed, from when a later forward could have run:

limit 2    F0  F1  .   .   B0  F2          F2's input is there at [1]: from then on, only memory keeps
                      [1]                  the rank from running it
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, described
from penstock.ir.deps import NONE, predecessors
from penstock.ir.live import live_bytes, one_each
from penstock.ir.operations import BEGINS_KEEPING, IS_RECEIVE
from penstock.ir.program import Program
from penstock.ir.timeline import DataWait, Timeline
from penstock.simulation.blocks import Block, blocks_of, in_order
from penstock.simulation.channels import Lags
from penstock.simulation.costs.costs import Costs
from penstock.simulation.durations import durations_s


class Cause(IntEnum):
    """The cause of an idle second."""

    DEPENDENCY = 0
    """The schedule's order: another rank had to compute first."""
    TRANSFER = 1
    """A message was on its way."""
    IMBALANCE = 2
    """Another rank's stage (or microbatch) takes longer than the mean one."""
    STRAGGLER = 3
    """Another rank took longer than it usually does, or this one began later than it could."""
    LAUNCH = 4
    """The host was preparing the next instruction."""
    SYNCHRONISATION = 5
    """The rank waited for a collective, or had finished and waited for the others to finish the step."""
    MEMORY = 6
    """A forward was ready, but the rank held as many activations as it may."""
    DATA = 7
    """The rank waited for its batch, or for a microbatch of it."""


NAME_OF_CAUSE = {
    Cause.DEPENDENCY: "dependency",
    Cause.TRANSFER: "transfer",
    Cause.IMBALANCE: "imbalance",
    Cause.STRAGGLER: "straggler",
    Cause.LAUNCH: "launch",
    Cause.SYNCHRONISATION: "synchronisation",
    Cause.MEMORY: "memory limit",
    Cause.DATA: "data loading",
}
"""The names of causes in tables, pages and JSON, for idle time and for losses."""
NEVER = inf
WORK = len(Cause)
"""The label, in the account of a rank, of the part of a computation that the mean stage takes as well."""


class IdleSpan(NamedTuple):
    """A stretch of a rank's idle time that has one cause."""

    begin_s: float
    end_s: float
    cause: Cause


@dataclass(frozen=True, slots=True, eq=False)
class IdleTimes:
    """Seconds of idle time by cause."""

    by_rank: NDArray[np.float64]
    """[num_ranks, causes] seconds."""

    @classmethod
    def of(cls, accounts: Sequence["RankAccount"]) -> "IdleTimes":
        return cls(np.array([account.idle_s for account in accounts]))

    def total(self, cause: Cause) -> float:
        """Return the seconds of all ranks that one cause took."""
        return float(self.by_rank[:, cause].sum())


def idle_times(timeline: Timeline, costs: Costs, *, memory_limit: int | Sequence[int] | None = None) -> IdleTimes:
    """Put every idle second between the first start and the last end down to a cause.

    `costs` say what is usual: for a predicted timeline those it was predicted with, for a measured one what is usual in
    it (`costs_from_timelines`). `memory_limit` counts activations, one number or one per rank; without it no second is
    put down to memory.
    """
    return IdleTimes.of(accounts_of(timeline, costs, memory_limit))


def accounts_of(
    timeline: Timeline, costs: Costs, memory_limit: int | Sequence[int] | None = None
) -> list["RankAccount"]:
    """Walk over the blocks and account for the time of each rank; `idle_times` explains the arguments."""
    blocks = blocks_of(timeline)
    expected = ExpectedDurations(timeline.program, costs)
    blocked_since_s = memory_blocked_since_s(timeline, costs, blocks, memory_limit)
    begin_s = min((block.start_s for block in blocks), default=0.0)
    first_rows = timeline.program.offsets.tolist()
    accounts = [RankAccount(begin_s, first_rows[rank]) for rank in range(timeline.num_ranks)]
    for index in in_order(blocks, timeline.num_ranks):
        block = blocks[index]
        account = accounts[block.rank]
        until_s = max(min(block.start_s, blocked_since_s[index]), account.end_s)
        _add_message(account, block, blocks, accounts, until_s)
        _add_local_waits(account, block, until_s, expected.launches_s(block, block.row - account.next_row))
        account.add(block.start_s, Cause.MEMORY, is_idle=True)
        _add_work(account, block, expected)
    _add_final_waits(accounts)
    return accounts


class ExpectedDurations:
    """The costs of the blocks of a program's timelines; launches come before a block and are no part of it."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self._program = program
        self._launch_s = costs.launch_s
        self._duration_s = durations_s(program, replace(costs, launch_s=0.0))
        factors = costs.per_microbatch("microbatch_compute_factor", program.num_microbatches)
        self._mean_s = costs.durations_s(program.num_stages).mean(axis=1) * factors.mean()
        self._overlap_factor = costs.overlap_factor

    def on_its_stage_s(self, block: Block) -> float:
        """Seconds for this stage and microbatch."""
        return float(self._duration_s[block.row : block.row + block.num_rows].sum())

    def on_the_mean_stage_s(self, block: Block) -> float:
        """Seconds for the mean stage and microbatch."""
        factor = self._overlap_factor if block.num_rows > 1 else 1.0
        return float(factor * np.sum(self._mean_s[self._program.op[list(block.rows)]]))

    def launches_s(self, block: Block, num_instructions: int) -> float:
        """Seconds that the host needs for so many instructions before a block, and for the block itself."""
        return (num_instructions + block.num_rows) * self._launch_s


class RankAccount:
    """The time of one rank from the first start on, in segments that have a label each."""

    def __init__(self, begin_s: float, next_row: int) -> None:
        self.begin_s = begin_s
        self.next_row = next_row
        """The row of the instruction after the rank's last block."""
        self.ends_s: list[float] = []
        self.labels: list[int] = []
        self.idle_s = [0.0] * len(Cause)
        self.spans: list[IdleSpan] = []
        """The idle stretches, in order, whose seconds `idle_s` adds up by cause."""
        self.late_s = 0.0
        """Seconds in which the rank had all that it needed, its launches too, and did not begin."""
        self.excess_s = 0.0
        """Seconds by which its computations took longer than they usually do."""

    @property
    def end_s(self) -> float:
        return self.ends_s[-1] if self.ends_s else self.begin_s

    def add(self, until_s: float, label: int, *, is_idle: bool) -> None:
        """Add a segment from the end of the last one to `until_s`, if that is later; `label` is a cause or `WORK`."""
        length_s = until_s - self.end_s
        if length_s <= 0:
            return
        if is_idle:
            self.idle_s[label] += length_s
            self.spans.append(IdleSpan(self.end_s, until_s, Cause(label)))
        self.ends_s.append(until_s)
        self.labels.append(label)

    def inherit(self, culprit: "RankAccount", until_s: float, *, of_work: Cause) -> None:
        """Add idle time until `until_s`, with the causes that the account of the rank waited for gives for that time.

        Where that rank did plain work, the cause is `of_work`.
        """
        first = bisect_right(culprit.ends_s, self.end_s)
        for end_s, label in zip(culprit.ends_s[first:], culprit.labels[first:], strict=True):
            if self.end_s >= until_s:
                return
            is_plain = label in (WORK, Cause.DEPENDENCY)
            self.add(min(end_s, until_s), of_work if is_plain else label, is_idle=True)
        self.add(until_s, of_work, is_idle=True)


def _add_message(
    account: RankAccount, block: Block, blocks: Sequence[Block], accounts: Sequence[RankAccount], until_s: float
) -> None:
    """Add the idle time in which a block waits for a message or a gather, up to `until_s`."""
    message = block.last_message
    if message is not None:
        producer = blocks[message.producer]
        account.inherit(accounts[producer.rank], min(producer.end_s, until_s), of_work=Cause.DEPENDENCY)
        for reduction in block.reductions:
            # The receive was posted behind the reduction, and no message is on its way before it is posted.
            if account.end_s < reduction.end_s <= message.posted_s:
                account.add(min(reduction.begin_s, until_s), Cause.TRANSFER, is_idle=True)
                account.add(min(reduction.end_s, until_s), Cause.SYNCHRONISATION, is_idle=True)
        account.add(min(message.arrival_s, until_s), Cause.TRANSFER, is_idle=True)
    if block.gather is not None:
        account.add(min(block.gather.end_s, until_s), Cause.SYNCHRONISATION, is_idle=True)


def _add_local_waits(account: RankAccount, block: Block, until_s: float, launches_s: float) -> None:
    """Add the idle time, up to `until_s`, in which a rank waits for nothing from other ranks.

    It waits for its data or a reduction; else its host is at work, for which `launches_s` seconds are usual.
    """
    for wait in block.local_waits:
        if wait.end_s > account.end_s:
            launches_s = _add_launches(account, min(max(wait.begin_s, account.end_s), until_s), launches_s)
            cause = Cause.DATA if isinstance(wait, DataWait) else Cause.SYNCHRONISATION
            account.add(min(wait.end_s, until_s), cause, is_idle=True)
    _add_launches(account, until_s, launches_s)


def _add_launches(account: RankAccount, until_s: float, launches_s: float) -> float:
    """Add host time up to `until_s`, as launches for the usual `launches_s`; return how many of these are left."""
    begin_s = account.end_s
    account.add(min(begin_s + launches_s, until_s), Cause.LAUNCH, is_idle=True)
    launched_s = account.end_s - begin_s
    account.late_s += max(until_s - account.end_s, 0.0)
    account.add(until_s, Cause.STRAGGLER, is_idle=True)  # nothing is missing, and still the rank does not begin
    return launches_s - launched_s


def _add_work(account: RankAccount, block: Block, expected: ExpectedDurations) -> None:
    """Add a block's time: first what the mean stage takes, then what its stage takes beyond, then what is unusual."""
    on_its_stage_s = expected.on_its_stage_s(block)
    ordinary_s = min(on_its_stage_s, expected.on_the_mean_stage_s(block))
    account.add(min(block.start_s + ordinary_s, block.end_s), WORK, is_idle=False)
    account.add(min(block.start_s + on_its_stage_s, block.end_s), Cause.IMBALANCE, is_idle=False)
    account.add(block.end_s, Cause.STRAGGLER, is_idle=False)
    account.excess_s += max(block.end_s - block.start_s - on_its_stage_s, 0.0)
    account.next_row = block.row + block.num_rows


def _add_final_waits(accounts: Sequence[RankAccount]) -> None:
    """Add the idle time of the ranks that are done before the last one."""
    last = max(accounts, key=lambda account: account.end_s)
    for account in accounts:
        account.inherit(last, last.end_s, of_work=Cause.SYNCHRONISATION)


def memory_blocked_since_s(
    timeline: Timeline, costs: Costs, blocks: Sequence[Block], memory_limit: int | Sequence[int] | None
) -> list[float]:
    """Return, per block, since when the rank could have run a forward but for its memory limit; `NEVER` otherwise.

    A block is a computation or an overlapped pair. `memory_limit` is a number of activations, for all ranks or one per
    rank; None is no limit. A backward that runs while its rank is full may have kept a later forward of the rank from
    running. It counts from when that forward's input had come; of several later forwards, the first one counts whose
    input had come.

    Raises:
        ConfigError: if there are neither as many limits as ranks nor a single one, or one is no whole number.
    """
    if memory_limit is None:
        return [NEVER] * len(blocks)
    limits = _per_rank(memory_limit, timeline.num_ranks)
    is_forward = BEGINS_KEEPING[timeline.program.op]
    # [num_rows] activations on the row's rank while the row runs: with each counted as one byte, bytes are a number.
    num_live = live_bytes(timeline.program, one_each(timeline.program))
    ready_s = _ready_s(timeline, costs)
    blocked_since_s = [NEVER] * len(blocks)
    # Backwards through the blocks, so that the forwards which a rank has yet to run are known at each block of it.
    earliest_forward_s = [NEVER] * timeline.num_ranks
    for index in reversed(range(len(blocks))):
        block = blocks[index]
        forwards = [row for row in block.rows if is_forward[row]]
        # Rows of a pair run together, so the count of the first row (`block.row`) is that of the block.
        if not forwards and num_live[block.row] >= limits[block.rank]:
            blocked_since_s[index] = earliest_forward_s[block.rank]
        ready_forwards_s = [float(ready_s[row]) for row in forwards]
        earliest_forward_s[block.rank] = min([earliest_forward_s[block.rank], *ready_forwards_s])
    return blocked_since_s


def _ready_s(timeline: Timeline, costs: Costs) -> NDArray[np.float64]:
    """[num_instructions] the earliest time at which a row could have run: the end of the last of its predecessors."""
    program = timeline.program
    sources = predecessors(program)
    lags = Lags.of(program, costs)
    is_receive = IS_RECEIVE[program.op]
    # A receive may have been posted long after its message could have come: the send counts.
    over_s = timeline.end_s.copy()
    over_s[is_receive] = timeline.end_s[sources[is_receive, 0]] + lags.of_rows(program)[is_receive]
    return np.asarray(np.where(sources == NONE, -inf, over_s[sources]).max(axis=1))


def _per_rank(limit: int | Sequence[int], num_ranks: int) -> Sequence[int]:
    limits = limit if isinstance(limit, Sequence) and not isinstance(limit, str) else [limit] * num_ranks
    for value in limits:
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
            raise ConfigError(f"{described(value)}; give whole numbers of 0 or more", key="memory_limit")
    if len(limits) != num_ranks:
        raise ConfigError(f"{len(limits)} values for {num_ranks} ranks; give one, or one per rank", key="memory_limit")
    return limits
