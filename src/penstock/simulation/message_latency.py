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
    """The messages that computations consume, one entry per message: its rows, and the ranks at both ends."""

    sends: Rows
    receives: Rows
    consumers: Rows
    senders: Rows
    receivers: Rows

    @classmethod
    def of(cls, program: Program) -> "Transfers":
        source = predecessors(program)[:, 0]
        receive = receive_of_row(program, source)
        consumers = np.flatnonzero(receive != NONE)
        receives = receive[consumers]
        is_sent = source[receives] != NONE
        consumers, receives = consumers[is_sent], receives[is_sent]
        sends, rank_of_row = source[receives], program.rank_of_row.astype(np.int64)
        return cls(sends, receives, consumers, rank_of_row[sends], rank_of_row[consumers])

    @property
    def rank_pairs(self) -> list[tuple[int, int]]:
        """The sending and the receiving rank of each message."""
        return list(zip(self.senders.tolist(), self.receivers.tolist(), strict=True))

    def idle_from_s(self, timeline: Timeline) -> Floats:
        """[num_messages] since when the receiver had nothing else to do than to wait for the message."""
        # The row before a consumer is of the same rank: at the earliest it is the receive itself. A receive is over for
        # its rank once it is posted, and so are a gather, and a reduction that does not hold it up; their end is where
        # they have arrived. A gather that the consumer needs is waited for before its message.
        row_before = self.consumers - 1
        is_launched = (IS_RECEIVE | GATHERS | REDUCES_REPLICAS)[timeline.program.op[row_before]]
        is_launched &= ~np.isin(row_before, blocking_reductions(timeline))
        free_s = np.where(is_launched, timeline.start_s[row_before], timeline.end_s[row_before])
        gathers = gather_of_row(timeline.program)[self.consumers]
        gathered_s = np.where(gathers == NONE, free_s, timeline.end_s[gathers])
        return np.asarray(np.maximum.reduce([free_s, gathered_s, data_ready_s(timeline, self.consumers)]))

    def is_awaited(self, timeline: Timeline) -> NDArray[np.bool_]:
        """[num_messages] whether the receiver was idle already when the message left."""
        return np.asarray(self.idle_from_s(timeline) < timeline.end_s[self.sends])

    def duration_s(self, timeline: Timeline) -> Floats:
        """[num_messages] seconds from the end of the send to the start of the computation."""
        return np.asarray(timeline.start_s[self.consumers] - timeline.end_s[self.sends])

    def num_bytes(self, program: Program, message_bytes: Sequence[int]) -> Floats:
        """[num_messages] bytes of each message; `message_bytes` are those of each stage's output, or one for all.

        A gradient is as large as the output that it belongs to, which is that of the stage that the gradient goes to.
        """
        stages = np.where(_MOVES_OUTPUT[program.op[self.sends]], program.stage[self.sends], program.peer[self.sends])
        bytes_of_stage = message_bytes if len(message_bytes) > 1 else [*message_bytes] * program.num_stages
        return np.asarray(np.array(bytes_of_stage, np.float64)[stages])


def robust_mean(seconds: Floats) -> float:
    """Return the mean without outliers by Tukey's rule.

    A straggler does not count. Ordinary variation does, as it adds up over a step; a median would hide it.
    """
    low, high = np.percentile(seconds, (25, 75))
    reach = ORDINARY * (high - low)
    return float(seconds[(seconds >= low - reach) & (seconds <= high + reach)].mean())


def message_latency_s(timelines: Sequence[Timeline], transfers: Transfers) -> Floats:
    """[num_messages] the robust mean latency of the message's channel, over those of its messages that were awaited.

    Where none of a channel was awaited, it is that of all channels; 0 where no message was.
    """
    channel_of_message = transfers.senders * timelines[0].num_ranks + transfers.receivers
    is_awaited = np.array([transfers.is_awaited(timeline) for timeline in timelines])
    durations_s = np.array([transfers.duration_s(timeline) for timeline in timelines])
    latency_s = np.zeros(len(channel_of_message))
    overall_s = robust_mean(durations_s[is_awaited]) if is_awaited.any() else 0.0
    for channel in np.unique(channel_of_message):
        of_channel = channel_of_message == channel
        awaited_s = durations_s[:, of_channel][is_awaited[:, of_channel]]
        latency_s[of_channel] = robust_mean(awaited_s) if len(awaited_s) else overall_s
    return latency_s


def with_true_arrivals(timeline: Timeline, *, after_posts: bool = True) -> Timeline:
    """Return a measured timeline in which messages that had been there before they were looked for arrive when they
    usually do, not when they were noticed.

    Unless `after_posts`, a message may arrive before its receive was posted: had the rank been earlier, it would have
    posted the receive earlier, too.
    """
    transfers = Transfers.of(timeline.program)
    expected_s = timeline.end_s[transfers.sends] + message_latency_s([timeline], transfers)
    posted_s, noted_s = timeline.start_s[transfers.receives], timeline.end_s[transfers.receives]
    # A message arrives when the rank noted it, if that waited for it; else after the usual time, but not later.
    was_there = expected_s <= transfers.idle_from_s(timeline)
    arrivals_s = np.where(was_there, np.minimum(expected_s, noted_s), noted_s)
    end_s = timeline.end_s.copy()
    end_s[transfers.receives] = np.maximum(arrivals_s, np.minimum(posted_s, noted_s)) if after_posts else arrivals_s
    return replace(timeline, end_s=end_s)
