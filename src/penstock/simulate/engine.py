"""The simulator: when every instruction of a program would run under given costs.

A rank runs its instructions in order. A computation starts when the rank is free and its message has arrived. A send
puts its message on the channel and is done; on an exclusive channel the message waits for those before it. Both are one
walk (`ir.walk`) over ranks and, beside them, channels: a channel is one more lane, whose rows are its messages in
order. Deterministic: no clock, no random numbers, and a channel's order is that of its sends.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError
from penstock.ir.deps import NONE, predecessors
from penstock.ir.instruction import Op
from penstock.ir.program import Program
from penstock.ir.timeline import Timeline
from penstock.ir.walk import walk
from penstock.simulate.costs import Costs

SENDS = (Op.SEND_FORWARD, Op.SEND_BACKWARD)
RECEIVES = (Op.RECEIVE_FORWARD, Op.RECEIVE_BACKWARD)


def simulate(program: Program, costs: Costs) -> Timeline:
    """Predict the timeline of a program.

    Raises:
        ScheduleError: if the program cannot run to its end; `penstock.check` says why.
        ConfigError: if the costs are for another number of stages.
    """
    num_rows = program.num_instructions
    before = predecessors(program)
    sends = np.flatnonzero(np.isin(program.op, SENDS))
    receives = np.flatnonzero(np.isin(program.op, RECEIVES))
    lanes, message_of_send = _channel_lanes(program, sends)
    # A gradient has the size of the output it belongs to, which is the peer's.
    output_of = np.where(program.op[sends] == Op.SEND_FORWARD, program.stage[sends], program.peer[sends])
    wire_s = costs.transfer_s(program.num_stages)[output_of]

    duration = np.concatenate([_durations_s(program, costs), np.zeros(len(sends))])
    lag = np.zeros(num_rows + len(sends))
    on_wire = duration if costs.is_exclusive else lag
    on_wire[message_of_send] = wire_s
    lag[message_of_send] += costs.latency_s

    waits = np.concatenate([before, np.full((len(sends), before.shape[1]), NONE, np.int32)])
    waits[message_of_send, 0] = sends
    message = np.full(num_rows, NONE, np.int64)
    message[sends] = message_of_send
    message[receives] = np.where(before[receives, 0] == NONE, NONE, message[before[receives, 0]])
    if (message[receives] == NONE).any():
        raise ScheduleError(f"{program.name}: a receive has no send; check the program before simulating")
    _wait_for_messages(waits, message, receives)
    waits[receives] = NONE

    joined = np.concatenate([program.joined, np.zeros(len(sends), np.bool_)])
    times = walk(np.concatenate([program.offsets, lanes[1:]]), waits, joined, duration, lag=lag)
    if not times.is_complete:
        raise ScheduleError(f"{program.name}: the program cannot run to its end; check it before simulating")
    start, end = times.start[:num_rows].copy(), times.end[:num_rows].copy()
    end[sends] = times.end[message_of_send]
    arrived = times.end[message[receives]] + lag[message[receives]]
    end[receives] = np.maximum(end[receives], arrived)
    return Timeline(
        program,
        "predicted",
        start,
        end,
        costs.bytes_per_stage("activation_bytes", program.num_stages),
        costs.bytes_per_stage("weight_context_bytes", program.num_stages),
    )


def _durations_s(program: Program, costs: Costs) -> NDArray[np.float64]:
    """[num_rows] seconds that each row keeps its rank busy."""
    table = costs.durations_s(program.num_stages)
    compute = program.is_compute
    duration = np.full(program.num_instructions, costs.launch_s)
    duration[compute] += table[program.op[compute], program.stage[compute]]
    return duration


def _channel_lanes(program: Program, sends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Lay out one row per message, channel after channel: the lanes' offsets, and the row of each send's message."""
    rank_of_stage = np.array(program.placement.rank_of_stage, np.int64)
    sender = program.rank_of_row[sends].astype(np.int64)
    channel = sender * program.num_ranks + rank_of_stage[program.peer[sends]]
    in_channel_order = np.argsort(channel, kind="stable")
    _, counts = np.unique(channel, return_counts=True)
    lanes = program.num_instructions + np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    message_of_send = np.empty(len(sends), np.int64)
    message_of_send[in_channel_order] = program.num_instructions + np.arange(len(sends))
    return lanes, message_of_send


def _wait_for_messages(waits: NDArray[np.int32], message: NDArray[np.int64], receives: NDArray[np.int64]) -> None:
    """Let consumers wait for the message itself: posting its receive does not hold up the rank."""
    is_receive = np.zeros(len(message), np.bool_)
    is_receive[receives] = True
    sources = waits[: len(message), 0]
    consumers = np.flatnonzero((sources != NONE) & is_receive[sources])
    waits[consumers, 0] = message[sources[consumers]]
