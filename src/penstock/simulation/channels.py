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
"""The neighbor that sends a stage its messages of a direction, which is an index among `operations.MESSAGES`."""


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """The rows that carry messages, and when these arrive."""

    receives: Rows
    carriers: NDArray[np.int32]
    """For each receive, the row after which its message arrives: a send, or a row of a queue."""
    lag_s: Floats
    """[num_instructions] seconds from the end of what carries the message that a row takes until the row may start."""
    posted_receives: NDArray[np.int32] | None = None
    """[num_instructions] the receive of the message that a row takes; None where messages do not wait for receives."""

    def arrivals_s(self, end_s: Floats) -> Floats:
        """For each receive, when its message arrives, from the ends of all rows."""
        begin_s = end_s[self.carriers]
        if self.posted_receives is not None:
            begin_s = np.maximum(begin_s, end_s[self.receives])
        return np.asarray(begin_s + self.lag_s[self.receives])


def add_messages(program: Program, costs: Costs, source: NDArray[np.int32], queues: Queues) -> Messages:
    """Let computations wait for the messages that they consume, and give messages their time on a link.

    `source` [num_instructions] is the row whose result each row takes, and is changed. That of a computation becomes
    the row that carries its message: its send or, on links that carry one message at a time, a row of the link's queue,
    which is added to `queues`. That of a receive becomes `NONE`: a receive only posts a buffer.

    Raises:
        ScheduleError: if a receive has no send.
        ConfigError: if the costs do not fit the program.
    """
    table = message_costs(program.placement, costs)
    factors = costs.per_microbatch("microbatch_bytes_factor", program.num_microbatches)
    receives = program.rows_of(IS_RECEIVE)
    if (source[receives] == NONE).any():
        raise ScheduleError(f"{program.name}: a receive has no send; check the program before simulating")
    # Over gloo and NCCL a message begins only once its receive is posted.
    posted_receives = receive_of_row(program, source) if costs.awaits_receives else None
    receive_of_send = np.full(program.num_instructions, NONE, np.int32)
    if posted_receives is not None:
        receive_of_send[source[receives]] = receives
    if len(receives):
        _replace_receives_by_sends(program, source)
    if table.is_exclusive.any():
        sends = program.rows_of(IS_SEND)
        senders = sends if len(sends) else program.compute_rows()
        wires = Wires.of(program, table, factors, senders)
        queued_senders = senders[wires.link != NONE]
        queue_rows = _add_link_queues(queued_senders, wires, queues, receive_of_send)
        # For rows on other ranks, replace the sender of a message by the row of the queue that carries the message.
        carrier = np.append(np.arange(program.num_instructions, dtype=np.int32), np.int32(NONE))
        carrier[queued_senders] = queue_rows
        consumers = np.flatnonzero((source != NONE) & (program.rank_of_row[source] != program.rank_of_row))
        source[consumers] = carrier[source[consumers]]
        if len(sends):
            queues.ended_by_queues.append((queued_senders, queue_rows))
    carriers = source[receives]
    source[receives] = NONE
    return Messages(receives, carriers, Lags.of(program, costs).of_rows(program), posted_receives)


def _replace_receives_by_sends(program: Program, source: NDArray[np.int32]) -> None:
    """Let computations wait for the send of their message instead of its receive, which holds up nobody once posted."""
    for part in blocks(program.num_instructions):
        computes = part.start + np.flatnonzero(IS_COMPUTE[program.op[part]])
        sources = source[computes]
        is_message = (sources != NONE) & IS_RECEIVE[program.op[sources]]
        source[computes[is_message]] = source[sources[is_message]]


@dataclass(frozen=True, slots=True, eq=False)
class Lags:
    """Seconds from the end of what carries a message until what takes the message may start.

    That is the latency, and on contention-free links the time on the wire.
    """

    wire_s: Floats
    """[num_ops, num_stages] seconds on the wire, by operation and stage of the consumer, for a microbatch of factor 1;
    all 0 where the factors of all microbatches are equal: then `latency_s` includes them."""
    latency_s: Floats
    """[num_ops, num_stages] seconds of latency, by operation and stage of the consumer."""
    factors: Floats
    """[num_microbatches] by which `wire_s` is multiplied."""

    @classmethod
    def of(cls, table: Table, costs: Costs) -> "Lags":
        factors = costs.per_microbatch("microbatch_bytes_factor", table.num_microbatches)
        messages = message_costs(table.placement, costs)
        wire_s = _by_consumer(table.placement, np.where(messages.is_exclusive, 0.0, messages.wire_s))
        latency_s = _by_consumer(table.placement, messages.latency_s)
        if (factors == factors[0]).all():
            return cls(np.zeros_like(wire_s), wire_s * factors[0] + latency_s, factors)
        return cls(wire_s, latency_s, factors)

    def of_rows(self, table: Table) -> Floats:
        """[num_rows] the lag of each row."""
        lag_s = np.empty(table.num_rows)
        varies = bool(self.wire_s.any())
        for part in blocks(table.num_rows):
            op_and_stage = table.op[part] * np.int32(table.num_stages) + table.stage[part]
            np.take(self.latency_s, op_and_stage, out=lag_s[part])
            if varies:
                lag_s[part] += np.take(self.wire_s, op_and_stage) * self.factors[table.microbatch[part]]
        return lag_s


@dataclass(frozen=True, slots=True, eq=False)
class Wires:
    """The serialized links by which messages leave, one entry for each row that may send one."""

    link: NDArray[np.int32]
    """A number for each ordered pair of ranks; `NONE` for a row whose message does not leave by such a link."""
    seconds: Floats
    """The seconds for which a message keeps its link busy."""

    @classmethod
    def of(cls, table: Table, costs: MessageCosts, factors: Floats, rows: Rows | slice = ALL_ROWS) -> "Wires":
        """Look up the links of these rows of a schedule or program."""
        op_and_stage = table.op[rows] * np.int32(table.num_stages) + table.stage[rows]
        is_queued = np.take(_by_sender(costs.is_exclusive.astype(np.float64)), op_and_stage) > 0
        link = np.where(is_queued, np.take(_by_sender(_links(table.placement)), op_and_stage), NONE)
        wire_s = np.take(_by_sender(costs.wire_s), op_and_stage) * factors[table.microbatch[rows]]
        return cls(link.astype(np.int32), np.where(is_queued, wire_s, 0.0))


def _by_consumer(placement: Placement, values: Floats) -> Floats:
    """[num_ops, num_stages] values of messages, by the operation and stage that receive or consume them; else 0.

    `values` [2, num_stages] are by direction and sending stage.
    """
    table = np.zeros((NUM_OPS, placement.num_stages))
    for direction, at in SENDER_OF.items():
        sender = stages_at(placement, at)
        is_consumer = np.where(IS_RECEIVE, MOVED, TAKEN) == direction
        table[is_consumer] = np.where(sender == NONE, 0.0, values[direction][sender])
    return table


def _by_sender(values: Floats) -> Floats:
    """[num_ops, num_stages] values of messages, by the operation and stage that send or make them; else 0.

    `values` [2, num_stages] are by direction and sending stage.
    """
    table = np.zeros((NUM_OPS, values.shape[1]))
    for direction, values_of_direction in enumerate(values):
        table[np.where(IS_SEND, MOVED, MADE) == direction] = values_of_direction
    return table


def _add_link_queues(queued_senders: Rows, wires: Wires, queues: Queues, receive_of_send: NDArray[np.int32]) -> Rows:
    """Add a queue for each serialized link, with a row for each message on it; return the row of each sender."""
    is_queued = wires.link != NONE
    links, wire_s = wires.link[is_queued], wires.seconds[is_queued]
    by_link = np.argsort(links, kind="stable")  # stable: messages of a link keep the order of their senders
    begins = np.flatnonzero(np.diff(links[by_link], prepend=NONE))
    lengths = np.diff(begins, append=len(queued_senders))
    senders, queue_rows = queued_senders[by_link], np.empty(len(queued_senders), np.int64)
    receives = receive_of_send[senders]
    queue_rows[by_link] = queues.add(lengths, after=senders, and_after=receives, duration_s=wire_s[by_link])
    return queue_rows


def _links(placement: Placement) -> Floats:
    """[2, num_stages] a number for each ordered pair of ranks, by direction and sending stage."""
    ranks = np.array(placement.rank_of_stage)
    receivers = np.array([placement.next_stage, placement.previous_stage])
    return np.asarray(ranks * placement.num_ranks + ranks[receivers], np.float64)
