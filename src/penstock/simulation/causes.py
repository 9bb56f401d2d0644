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
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.ir.timeline import DataWait, Timeline
from penstock.simulation.blocks import Block, blocks_of, in_order
from penstock.simulation.costs.costs import Costs
from penstock.simulation.expected import ExpectedDurations
from penstock.simulation.memory_blocked import memory_blocked_since_s


class Cause(IntEnum):
    """What an idle second is put down to."""

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


WORK = len(Cause)
"""In a rank's record: the part of a computation that the mean stage takes as well."""


@dataclass(frozen=True, slots=True, eq=False)
class IdleTimes:
    """Seconds of idle time by cause."""

    by_rank: NDArray[np.float64]
    """[num_ranks, causes] seconds."""

    def total(self, cause: Cause) -> float:
        """Return the seconds of all ranks that one cause took."""
        return float(self.by_rank[:, cause].sum())

    @property
    def idle_s(self) -> NDArray[np.float64]:
        """[num_ranks] all idle seconds, of the step's makespan."""
        return np.asarray(self.by_rank.sum(axis=1))


class IdleSpan(NamedTuple):
    """A stretch of a rank's idle time that has one cause."""

    begin_s: float
    end_s: float
    cause: Cause


def idle_times(timeline: Timeline, costs: Costs, *, memory_limit: int | Sequence[int] | None = None) -> IdleTimes:
    """Put every idle second between the first start and the last end down to a cause.

    `costs` say what is usual: for a predicted timeline those it was predicted with, for a measured one what is usual in
    it (`costs_from_timelines`). `memory_limit` counts activations, one number or one per rank; without it no second is
    put down to memory.
    """
    return IdleTimes(np.array([record.idle_s for record in _records(timeline, costs, memory_limit)]))


def late_starts_s(timeline: Timeline, costs: Costs) -> NDArray[np.float64]:
    """[num_ranks] seconds in which each rank had all that it needed, its launches too, and did not begin."""
    return np.array([record.late_s for record in _records(timeline, costs, None)])


def idle_spans(timeline: Timeline, costs: Costs) -> list[list[IdleSpan]]:
    """Return, per rank and in order, the stretches that `idle_times` adds up."""
    return [record.spans for record in _records(timeline, costs, None)]


def _records(timeline: Timeline, costs: Costs, memory_limit: int | Sequence[int] | None) -> list["_Record"]:
    blocks = blocks_of(timeline)
    expected = ExpectedDurations(timeline.program, costs)
    blocked_since_s = memory_blocked_since_s(timeline, costs, blocks, memory_limit)
    begin_s = min((block.start_s for block in blocks), default=0.0)
    first_rows = timeline.program.offsets.tolist()
    records = [_Record(begin_s, first_rows[rank]) for rank in range(timeline.num_ranks)]
    for index in in_order(blocks, timeline.num_ranks):
        block = blocks[index]
        record = records[block.rank]
        until_s = max(min(block.start_s, blocked_since_s[index]), record.end_s)
        _add_message(record, block, blocks, records, until_s)
        _add_own(record, block, until_s, expected.launches_s(block, block.row - record.next_row))
        record.add(block.start_s, Cause.MEMORY, is_idle=True)
        _add_work(record, block, expected)
    _add_ends(records)
    return records


class _Record:
    """What one rank did from the first start on: labelled segments, one after the other."""

    def __init__(self, begin_s: float, next_row: int) -> None:
        self.begin_s = begin_s
        self.next_row = next_row
        """The instruction after the last block."""
        self.ends_s: list[float] = []
        self.labels: list[int] = []
        self.idle_s = [0.0] * len(Cause)
        self.late_s = 0.0
        self.spans: list[IdleSpan] = []

    @property
    def end_s(self) -> float:
        return self.ends_s[-1] if self.ends_s else self.begin_s

    def add(self, until_s: float, label: int, *, is_idle: bool) -> None:
        length_s = until_s - self.end_s
        if length_s <= 0:
            return
        if is_idle:
            self.idle_s[label] += length_s
            self.spans.append(IdleSpan(self.end_s, until_s, Cause(label)))
        self.ends_s.append(until_s)
        self.labels.append(label)

    def inherit(self, other: "_Record", until_s: float, *, of_work: Cause) -> None:
        """Be idle until then, for the reasons that the other rank's record gives; its plain work is `of_work`."""
        first = bisect_right(other.ends_s, self.end_s)
        for end_s, label in zip(other.ends_s[first:], other.labels[first:], strict=True):
            if self.end_s >= until_s:
                return
            ordinary = label in (WORK, Cause.DEPENDENCY)
            self.add(min(end_s, until_s), of_work if ordinary else label, is_idle=True)
        self.add(until_s, of_work, is_idle=True)


def _add_message(
    record: _Record, block: Block, blocks: Sequence[Block], records: Sequence[_Record], until_s: float
) -> None:
    """The idle time until what a block waits for has come from elsewhere."""
    message = block.last_message
    if message is not None:
        producer = blocks[message.producer]
        record.inherit(records[producer.rank], min(producer.end_s, until_s), of_work=Cause.DEPENDENCY)
        for each in block.reductions:
            # The receive was posted behind it, and no message is on its way before.
            if record.end_s < each.end_s <= message.posted_s:
                record.add(min(each.begin_s, until_s), Cause.TRANSFER, is_idle=True)
                record.add(min(each.end_s, until_s), Cause.SYNCHRONISATION, is_idle=True)
        record.add(min(message.arrival_s, until_s), Cause.TRANSFER, is_idle=True)
    if block.gather is not None:
        record.add(min(block.gather.end_s, until_s), Cause.SYNCHRONISATION, is_idle=True)


def _add_own(record: _Record, block: Block, until_s: float, launches_s: float) -> None:
    """The idle time in which all has come from elsewhere: data, reductions, and else the host is at work."""
    for wait in block.own_waits:
        if wait.end_s > record.end_s:
            launches_s = _add_host(record, min(max(wait.begin_s, record.end_s), until_s), launches_s)
            cause = Cause.DATA if isinstance(wait, DataWait) else Cause.SYNCHRONISATION
            record.add(min(wait.end_s, until_s), cause, is_idle=True)
    _add_host(record, until_s, launches_s)


def _add_host(record: _Record, until_s: float, launches_s: float) -> float:
    """The host launches, for so long as it usually needs; return what is left of that."""
    begin_s = record.end_s
    record.add(min(begin_s + launches_s, until_s), Cause.LAUNCH, is_idle=True)
    launched_s = record.end_s - begin_s
    record.late_s += max(until_s - record.end_s, 0.0)
    record.add(until_s, Cause.STRAGGLER, is_idle=True)  # all is there, and still the rank does not begin
    return launches_s - launched_s


def _add_work(record: _Record, block: Block, expected: ExpectedDurations) -> None:
    on_its_stage_s = expected.on_its_stage_s(block)
    ordinary_s = min(on_its_stage_s, expected.on_the_mean_stage_s(block))
    record.add(min(block.start_s + ordinary_s, block.end_s), WORK, is_idle=False)
    record.add(min(block.start_s + on_its_stage_s, block.end_s), Cause.IMBALANCE, is_idle=False)
    record.add(block.end_s, Cause.STRAGGLER, is_idle=False)
    record.next_row = block.row + block.num_rows


def _add_ends(records: Sequence[_Record]) -> None:
    """The idle time of those that are done before the last one is."""
    last = max(records, key=lambda record: record.end_s)
    for record in records:
        record.inherit(last, last.end_s, of_work=Cause.SYNCHRONISATION)
