"""Messages on links: a message delays the computation that takes it, and neither of the two ranks.

rank 0     F0  SEND_F0  F1  SEND_F1          a serialized link is a queue (`simulation.queues`): one message at a time;
0 -> 1         [ F0      ][ F1      ]~~~>    a contention-free link, and any latency (~), is a lag on the edge
rank 1     RECV_F0  RECV_F1      F0          a receive is posted and holds nothing up; its consumer waits

Where costs say so (`awaits_receives`), a message also waits until its receive is posted, as over gloo and NCCL.
A schedule that is not lowered has no sends: a message leaves when the computation that makes it has ended.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError
from penstock.ir.awaits import receive_of_row
from penstock.ir.deps import NONE, stages_at
from penstock.ir.hot import blocks
from penstock.ir.operations import IS_COMPUTE, IS_RECEIVE, IS_SEND, MADE, MOVED, NUM_OPS, TAKEN, At
from penstock.ir.program import Program
from penstock.ir.table import Table
from penstock.ir.timeline import Floats
from penstock.placement import Placement
from penstock.simulation.costs.costs import Costs
from penstock.simulation.costs.messages import BACKWARD, FORWARD, MessageCosts, message_costs
from penstock.simulation.queues import Queues, Rows

ALL_ROWS = slice(None)
SENDER_OF = {FORWARD: At.UPSTREAM, BACKWARD: At.DOWNSTREAM}
"""By direction, which is the index among `operations.MESSAGES`: where the messages come from that a stage takes."""


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """The rows that carry messages, and when these arrive."""

    receives: Rows
    carriers: NDArray[np.int32]
    """For each receive, the row after which its message arrives: a send, or a row of a queue."""
    lag_s: Floats
    """[num_instructions] seconds from the end of what carries the message that a row takes until the row may start."""
    posts: NDArray[np.int32] | None = None
    """[num_instructions] the receive of the message that a row takes; None where messages do not wait for receives."""

    def arrivals_s(self, end_s: Floats) -> Floats:
        """For each receive, when its message arrives, from the ends of all rows."""
        begin_s = end_s[self.carriers] if self.posts is None else np.maximum(end_s[self.carriers], end_s[self.receives])
        return np.asarray(begin_s + self.lag_s[self.receives])


def add_messages(program: Program, costs: Costs, before: NDArray[np.int32], queues: Queues) -> Messages:
    """Put messages on their links, and let their consumers, not their receives, wait for them.

    `before` holds, per row, the row that its data comes from; it is changed.

    Raises:
        ScheduleError: if a receive has no send.
        ConfigError: if the costs do not fit the program.
    """
    table = message_costs(program.placement, costs)
    factors = costs.per_microbatch("microbatch_bytes_factor", program.num_microbatches)
    receives = program.rows_of(IS_RECEIVE)
    if (before[receives] == NONE).any():
        raise ScheduleError(f"{program.name}: a receive has no send; check the program before simulating")
    posts = receive_of_row(program, before) if costs.awaits_receives else None
    receive_of_send = np.full(program.num_instructions, NONE, np.int32)
    if posts is not None:
        receive_of_send[before[receives]] = receives
    # Posting a receive does not hold up the rank: consumers wait for the send of their message instead.
    for part in blocks(program.num_instructions) if len(receives) else ():
        computes = part.start + np.flatnonzero(IS_COMPUTE[program.op[part]])
        sources = before[computes]
        waits = (sources != NONE) & IS_RECEIVE[program.op[sources]]
        before[computes[waits]] = before[sources[waits]]
    if table.is_exclusive.any():
        sends = program.rows_of(IS_SEND)
        sources = sends if len(sends) else program.compute_rows()
        wires = Wires.of(program, table, factors, sources)
        leaving = sources[wires.link != NONE]
        runs = _queue(leaving, wires, queues, receive_of_send)
        # On other ranks, what sends a message is replaced by the row of the queue that carries it.
        carrier = np.append(np.arange(program.num_instructions, dtype=np.int32), np.int32(NONE))
        carrier[leaving] = runs
        takers = np.flatnonzero((before != NONE) & (program.rank_of_row[before] != program.rank_of_row))
        before[takers] = carrier[before[takers]]
        if len(sends):
            queues.outlasting.append((leaving, runs))
    carriers = before[receives]
    before[receives] = NONE
    return Messages(receives, carriers, Lags.of(program, costs).of_rows(program), posts)


@dataclass(frozen=True, slots=True, eq=False)
class Lags:
    """Seconds from the end of what carries a message until what takes the message may start.

    That is the latency, and on contention-free links the time on the wire.
    """

    wire_s: Floats
    """[num_ops, num_stages] by what takes the message, times a factor; all 0 where the factors are equal."""
    latency_s: Floats
    """[num_ops, num_stages] the rest."""
    factors: Floats
    """[num_microbatches] of `wire_s`."""

    @classmethod
    def of(cls, table: Table, costs: Costs) -> "Lags":
        factors = costs.per_microbatch("microbatch_bytes_factor", table.num_microbatches)
        messages = message_costs(table.placement, costs)
        wire_s = _by_taker(table.placement, np.where(messages.is_exclusive, 0.0, messages.wire_s))
        latency_s = _by_taker(table.placement, messages.latency_s)
        if (factors == factors[0]).all():
            return cls(np.zeros_like(wire_s), wire_s * factors[0] + latency_s, factors)
        return cls(wire_s, latency_s, factors)

    def of_rows(self, table: Table) -> Floats:
        """[num_rows] the lag of each row."""
        lag_s = np.empty(table.num_rows)
        varies = bool(self.wire_s.any())
        for part in blocks(table.num_rows):
            key = table.op[part] * np.int32(table.num_stages) + table.stage[part]
            np.take(self.latency_s, key, out=lag_s[part])
            if varies:
                lag_s[part] += np.take(self.wire_s, key) * self.factors[table.microbatch[part]]
        return lag_s


@dataclass(frozen=True, slots=True, eq=False)
class Wires:
    """[rows] the serialized links by which messages leave, of the rows that they leave after."""

    link: NDArray[np.int32]
    """A number for each ordered pair of ranks; `NONE` for a row whose message does not leave by such a link."""
    seconds: Floats
    """That a message keeps the link busy."""

    @classmethod
    def of(cls, table: Table, costs: MessageCosts, factors: Floats, rows: Rows | slice = ALL_ROWS) -> "Wires":
        """Look them up for these rows of a schedule or program."""
        key = table.op[rows] * np.int32(table.num_stages) + table.stage[rows]
        is_queued = np.take(_by_sender(costs.is_exclusive.astype(np.float64)), key) > 0
        link = np.where(is_queued, np.take(_by_sender(_links(table.placement)), key), NONE)
        wire_s = np.take(_by_sender(costs.wire_s), key) * factors[table.microbatch[rows]]
        return cls(link.astype(np.int32), np.where(is_queued, wire_s, 0.0))


def _by_taker(placement: Placement, values: Floats) -> Floats:
    """[num_ops, num_stages] what messages have by direction and sending stage, for the rows that take them; else 0."""
    table = np.zeros((NUM_OPS, placement.num_stages))
    for direction, at in SENDER_OF.items():
        sender = stages_at(placement, at)
        takes = np.where(IS_RECEIVE, MOVED, TAKEN) == direction
        table[takes] = np.where(sender == NONE, 0.0, values[direction][sender])
    return table


def _by_sender(values: Floats) -> Floats:
    """The same for the rows that messages leave after: sends, and computations where there are none."""
    table = np.zeros((NUM_OPS, values.shape[1]))
    for direction, of_direction in enumerate(values):
        table[np.where(IS_SEND, MOVED, MADE) == direction] = of_direction
    return table


def _queue(leaving: Rows, wires: Wires, queues: Queues, receive_of_send: NDArray[np.int32]) -> Rows:
    """Give each message of a serialized link, by what sends it, a row of the link's queue; return these rows."""
    is_queued = wires.link != NONE
    links, wire_s = wires.link[is_queued], wires.seconds[is_queued]
    in_order = np.argsort(links, kind="stable")
    begins = np.flatnonzero(np.diff(links[in_order], prepend=NONE))
    sent, runs = leaving[in_order], np.empty(len(leaving), np.int64)
    lengths = np.diff(begins, append=len(leaving))
    runs[in_order] = queues.add(lengths, after=sent, and_after=receive_of_send[sent], duration_s=wire_s[in_order])
    return runs


def _links(placement: Placement) -> Floats:
    """[2, num_stages] a number for each ordered pair of ranks, by direction and sending stage."""
    ranks = np.array(placement.rank_of_stage)
    receivers = np.array([placement.next_stage, placement.previous_stage])
    return np.asarray(ranks * placement.num_ranks + ranks[receivers], np.float64)
