"""Messages on their way: a send is done at once, its message waits for those before it where the channel is exclusive.

rank 0     F0  SEND_F0  F1  SEND_F1          an exclusive channel is a queue (`simulation.queues`), a wide one only a
0 -> 1         [ F0      ][ F1      ]~~~>    lag behind the send; the latency (~) is a lag either way
rank 1     RECV_F0  RECV_F1      F0          a receive is posted and holds nothing up; its consumer waits
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError
from penstock.ir.deps import NONE
from penstock.ir.hot import blocks
from penstock.ir.operations import IS_COMPUTE, IS_RECEIVE, IS_SEND, Op
from penstock.ir.program import Program
from penstock.simulation.costs.costs import Costs
from penstock.simulation.costs.messages import BACKWARD, FORWARD, MessageCosts, message_costs
from penstock.simulation.queues import Queues, Rows

DIRECTION_OF_SEND = {Op.SEND_FORWARD: FORWARD, Op.SEND_BACKWARD: BACKWARD}


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """The rows at both ends of all messages."""

    queued: Rows
    """Sends on exclusive channels."""
    wires: Rows
    """The rows of queues that carry what these send."""
    receives: Rows
    carriers: NDArray[np.int32]
    """For each receive, the row after which its message arrives: a send, or a row of a queue."""
    lag_s: NDArray[np.float64]
    """[num_instructions] seconds from the end of a send to the arrival on a wide channel."""


def add_messages(program: Program, costs: Costs, before: NDArray[np.int32], queues: Queues) -> Messages:
    """Put messages on their channels, and let their consumers, not their receives, wait for them.

    In `before` stands, per row, the row that its data comes from; it is changed.

    Raises:
        ScheduleError: if a receive has no send.
        ConfigError: if the costs do not fit the program.
    """
    table = message_costs(program.placement, costs)
    factors = costs.per_microbatch("microbatch_bytes_factor", program.num_microbatches)
    lag_s = _lags_s(program, table, factors)
    receives = _rows_where(program, IS_RECEIVE)
    carriers = before[receives]
    if (carriers == NONE).any():
        raise ScheduleError(f"{program.name}: a receive has no send; check the program before simulating")
    queued = wires = np.empty(0, np.int64)
    if table.is_exclusive.any():
        queued, wires = _queue(program, table, factors, queues)
        carrier_of_send = np.arange(program.num_instructions, dtype=np.int32)
        carrier_of_send[queued] = wires
        before[receives] = carriers = carrier_of_send[carriers]
    _let_consumers_wait(program, before)
    before[receives] = NONE
    return Messages(queued, wires, receives, carriers, lag_s)


def _by_op(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[num_ops, num_stages] what messages have by direction and stage, in the rows of their sends; else 0."""
    table = np.zeros((len(Op), values.shape[1]))
    for op, direction in DIRECTION_OF_SEND.items():
        table[op] = values[direction]
    return table


def _lags_s(program: Program, table: MessageCosts, factors: NDArray[np.float64]) -> NDArray[np.float64]:
    is_wide = ~table.is_exclusive
    wire_s, latency_s = _by_op(table.wire_s * is_wide), _by_op(table.latency_s * is_wide)
    lag_s = np.empty(program.num_instructions)
    are_equal = bool((factors == factors[0]).all())
    for part in blocks(program.num_instructions):
        key = program.op[part] * np.int32(program.num_stages) + program.stage[part]
        if are_equal:
            np.take(wire_s * factors[0] + latency_s, key, out=lag_s[part])
        else:
            lag_s[part] = np.take(wire_s, key) * factors[program.microbatch[part]] + np.take(latency_s, key)
    return lag_s


def _rows_where(program: Program, wanted: NDArray[np.bool_]) -> Rows:
    """The rows whose operations are wanted."""
    found = [part.start + np.flatnonzero(wanted[program.op[part]]) for part in blocks(program.num_instructions)]
    return np.concatenate([np.empty(0, np.int64), *found])


def _let_consumers_wait(program: Program, before: NDArray[np.int32]) -> None:
    """Replace receives by what carries their message: posting one does not hold up the rank."""
    for part in blocks(program.num_instructions):
        computes = part.start + np.flatnonzero(IS_COMPUTE[program.op[part]])
        sources = before[computes]
        waits = (sources != NONE) & IS_RECEIVE[program.op[sources]]
        before[computes[waits]] = before[sources[waits]]


def _queue(program: Program, table: MessageCosts, factors: NDArray[np.float64], queues: Queues) -> tuple[Rows, Rows]:
    """Give each message of an exclusive channel a row of the channel's queue; return the sends and these rows."""
    sends = _rows_where(program, IS_SEND)
    key = program.op[sends] * np.int32(program.num_stages) + program.stage[sends]
    is_queued = np.take(_by_op(table.is_exclusive.astype(np.float64)), key) > 0
    queued, key = sends[is_queued], key[is_queued]
    ranks = np.array(program.placement.rank_of_stage, np.int64)
    channel = ranks[program.stage[queued]] * program.num_ranks + ranks[program.peer[queued]]
    in_order = np.argsort(channel, kind="stable")
    begins = np.flatnonzero(np.diff(channel[in_order], prepend=NONE))
    lengths = np.diff(begins, append=len(queued))
    wires = np.empty(len(queued), np.int64)
    wires[in_order] = queues.next_row + np.arange(len(queued))
    wire_s = np.take(_by_op(table.wire_s), key) * factors[program.microbatch[queued]]
    latency_s = np.take(_by_op(table.latency_s), key)
    queues.add(lengths, after=queued[in_order], duration_s=wire_s[in_order], lag_s=latency_s[in_order])
    return queued, wires
