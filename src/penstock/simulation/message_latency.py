"""The messages of a measured timeline, each from its send to the computation that takes it.

A rank notes an arrival when it looks for the message. If it was idle before, that is when the message came; if it was
busy, the message may have been there for long:

    rank 0   [F0] send
    rank 1   [ B0        ]|wait|[F0]      the message was there long before the wait
    rank 1        . . . .  wait |[F0]     it was awaited: the end of the wait is its arrival

A rank that waits for data, or for a gather, is as busy as one that computes: it looks for the message after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.ir.awaits import gather_of_row, receive_of_row
from penstock.ir.collectives import GATHERS, REDUCES_REPLICAS
from penstock.ir.deps import NONE, predecessors
from penstock.ir.operations import IS_RECEIVE, OPERATIONS, Op, Value
from penstock.ir.program import Program
from penstock.ir.timeline import Floats, Timeline
from penstock.simulation.blocks import blocking_reductions, data_ready_s

ORDINARY = 1.5
"""How far outside the middle half a value may be, in widths of that half, and still be ordinary."""
_MOVES_OUTPUT = np.array([OPERATIONS[op].message is Value.OUTPUT for op in Op])

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Transfers:
    """One entry per message that a computation takes: its rows, and the ranks at both ends."""

    sends: Rows
    receives: Rows
    consumers: Rows
    senders: Rows
    receivers: Rows

    @classmethod
    def of(cls, program: Program) -> "Transfers":
        before = predecessors(program)[:, 0]
        received = receive_of_row(program, before)
        consumers = np.flatnonzero(received != NONE)
        receives = received[consumers]
        is_sent = before[receives] != NONE
        consumers, receives = consumers[is_sent], receives[is_sent]
        sends, rank_of_row = before[receives], program.rank_of_row.astype(np.int64)
        return cls(sends, receives, consumers, rank_of_row[sends], rank_of_row[consumers])

    @property
    def ends(self) -> list[tuple[int, int]]:
        """Sending and receiving rank of each message."""
        return list(zip(self.senders.tolist(), self.receivers.tolist(), strict=True))

    def idle_from_s(self, timeline: Timeline) -> Floats:
        """When each receiver had nothing else to do than to wait for its message."""
        # The row before a consumer is of the same rank: at the earliest it is the receive itself. A receive is over for
        # its rank once it is posted, and so are a gather, and a reduction that does not hold it up; their end is where
        # they have arrived. A gather that the consumer needs is waited for before its message.
        last = self.consumers - 1
        is_launched = (IS_RECEIVE | GATHERS | REDUCES_REPLICAS)[timeline.program.op[last]]
        is_launched &= ~np.isin(last, blocking_reductions(timeline))
        done_s = np.where(is_launched, timeline.start_s[last], timeline.end_s[last])
        gathers = gather_of_row(timeline.program)[self.consumers]
        gathered_s = np.where(gathers == NONE, done_s, timeline.end_s[gathers])
        return np.asarray(np.maximum.reduce([done_s, gathered_s, data_ready_s(timeline, self.consumers)]))

    def is_awaited(self, timeline: Timeline) -> NDArray[np.bool_]:
        """Whether the receiver was idle already when the message left."""
        return np.asarray(self.idle_from_s(timeline) < timeline.end_s[self.sends])

    def duration_s(self, timeline: Timeline) -> Floats:
        """From the end of the send to the start of the computation."""
        return np.asarray(timeline.start_s[self.consumers] - timeline.end_s[self.sends])

    def num_bytes(self, program: Program, message_bytes: Sequence[int]) -> Floats:
        """Bytes of each message, from those of each stage's output (or one for all); a gradient has its output's."""
        stages = np.where(_MOVES_OUTPUT[program.op[self.sends]], program.stage[self.sends], program.peer[self.sends])
        one_each = message_bytes if len(message_bytes) > 1 else [*message_bytes] * program.num_stages
        return np.asarray(np.array(one_each, np.float64)[stages])


def robust_mean(seconds: Floats) -> float:
    """Return the mean without outliers by Tukey's rule.

    A straggler does not count. Ordinary variation does, as it adds up over a step; a median would hide it.
    """
    low, high = np.percentile(seconds, (25, 75))
    reach = ORDINARY * (high - low)
    return float(seconds[(seconds >= low - reach) & (seconds <= high + reach)].mean())


def message_latency_s(timelines: Sequence[Timeline], transfers: Transfers) -> Floats:
    """[messages] the robust mean latency of the same channel over awaited messages; 0 where none was awaited."""
    channel = transfers.senders * timelines[0].num_ranks + transfers.receivers
    awaited = np.array([transfers.is_awaited(timeline) for timeline in timelines])
    durations_s = np.array([transfers.duration_s(timeline) for timeline in timelines])
    found = np.zeros(len(channel))
    overall_s = robust_mean(durations_s[awaited]) if awaited.any() else 0.0
    for each in np.unique(channel):
        own = durations_s[:, channel == each][awaited[:, channel == each]]
        found[channel == each] = robust_mean(own) if len(own) else overall_s
    return found


def with_true_arrivals(timeline: Timeline, *, after_posts: bool = True) -> Timeline:
    """Return a measured timeline in which messages that had been there before they were looked for arrive when they
    usually do, not when they were noticed.

    Unless `after_posts`, that is without regard to when a receive was posted: had its rank been
    earlier, it would have been, too. So some messages arrive before their receive is posted.
    """
    transfers = Transfers.of(timeline.program)
    expected_s = timeline.end_s[transfers.sends] + message_latency_s([timeline], transfers)
    posted_s, noted_s = timeline.start_s[transfers.receives], timeline.end_s[transfers.receives]
    # As noted if they were awaited, else after the usual time, but not later than noted.
    was_there = expected_s <= transfers.idle_from_s(timeline)
    arrivals_s = np.where(was_there, np.minimum(expected_s, noted_s), noted_s)
    end_s = timeline.end_s.copy()
    end_s[transfers.receives] = np.maximum(arrivals_s, np.minimum(posted_s, noted_s)) if after_posts else arrivals_s
    return replace(timeline, end_s=end_s)
