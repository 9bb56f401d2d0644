"""Proof 3, the short way: a program whose messages keep a linear extension of its actions cannot deadlock.

All actions have one order that keeps every dependency (`ir.linear_extension`). A message has its place in that order:
right after the action that makes it, or where that action ends. By either rule each action and message gets a logical
timestamp (Lamport 1978). Suppose that on every rank

1. actions and sends are in the order of their timestamps,
2. each receive is before all actions and sends with later timestamps than its message,
3. the sends and receives of a pair of ranks are in the order of their timestamps,
4. collectives that join ranks are after all actions and messages.

Then whatever an action or message waits for, under every model but `coalesced`, has an earlier timestamp: so there is
no cycle of waits. By 1 a send is after what makes its message, by 2 a receive is before its consumer, and by 3 every
channel keeps its order. If also

5. receives are in the order of their timestamps among all actions and messages of their rank,

there is no cycle under `coalesced` either. The last timestamp of a group is earlier than the action after it. The end
of a group waits for the start of the groups at the other ends of its messages. Each of those starts after an action and
a group whose timestamps are earlier than that of the message that the two groups share.

The lowering makes programs that keep 1 to 4, and 5 where it is asked to. Others may run as well: for them, `channels`
and `transports` look at each model on its own.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from penstock.ir.collectives import JOINS_RANKS
from penstock.ir.deps import NONE
from penstock.ir.hot import Array, Hot, Int32s
from penstock.ir.linear_extension import Starts, order_by_ends
from penstock.ir.operations import IS_COMPUTE, IS_RECEIVE, IS_SEND
from penstock.ir.table import Ints
from penstock.ir.transports import COALESCED, MODELS, TransportModel
from penstock.proofs.channels import Messages, join_messages
from penstock.proofs.report import Subject

COMPUTE, SEND, RECEIVE, JOIN, OTHER = range(5)
ROLES = np.select([IS_COMPUTE, IS_SEND, IS_RECEIVE, JOINS_RANKS], [COMPUTE, SEND, RECEIVE, JOIN], OTHER).astype(np.int8)
"""[NUM_OPS] the role of an operation in this proof."""


def proved_by_order(
    subject: Subject, messages: Sequence[Messages], start: Starts, *, is_grouped: bool = True
) -> tuple[TransportModel, ...]:
    """Return the models under which a program ends by the conditions alone; none where one of 1 to 4 does not hold.

    `start` are the starts of its actions in an untimed walk. Without `is_grouped`, condition 5 is of no interest.
    """
    num_conditions = _conditions_kept(subject, _timestamps(subject, messages, start))
    if num_conditions < (5 if is_grouped else 4):
        num_conditions = max(num_conditions, _conditions_kept(subject, _timestamps_by_ends(subject, messages, start)))
    return tuple(model for model in MODELS if num_conditions >= (5 if model == COALESCED else 4))


class Rows(NamedTuple):
    """Columns of the program with the timestamp of each row, the role of each operation, and the rank of each stage."""

    op: Any
    roles: Any
    timestamp: Any
    peer: Any
    rank_of_stage: Any


class LastMessages(NamedTuple):
    """The last message between the rank that is looked at and each other rank, [num_ranks] by that rank."""

    time: Any
    """The timestamp of the message."""
    written_by: Any
    """The rank that wrote the entry; an entry of an earlier rank does not count."""


def _conditions_kept(subject: Subject, timestamp: Array) -> int:
    program = subject.program
    rows = Rows(program.op, ROLES, timestamp, program.peer, subject.rank_of_stage)
    last_messages = LastMessages(np.zeros(program.num_ranks, np.int64), np.full(program.num_ranks, NONE, np.int64))
    return int(_COUNT_CONDITIONS(program.num_instructions, program.offsets, rows, last_messages))


def _timestamps(subject: Subject, messages: Sequence[Messages], start: Starts) -> Array:
    """[num_instructions] multiples of 3 for actions, and after its maker's, the timestamp of both ends of a message."""
    num_ranks = subject.table.num_ranks
    largest = 3 * num_ranks * (int(start.max(initial=0)) + 1)
    number = np.int32 if largest <= np.iinfo(np.int32).max else np.int64
    timestamp: Ints = np.full(subject.table.num_rows, NONE, number)
    # The linear extension is by start and rank; only the actions of a pair agree in both.
    for rank, (begin, end) in enumerate(pairwise(subject.schedule.offsets.tolist())):
        timestamp[subject.action_row[begin:end]] = 3 * (num_ranks * start[begin:end].astype(timestamp.dtype) + rank)
    # Both messages of a pair leave after it, that of its first action first.
    second = np.flatnonzero(subject.table.joined) + 1
    timestamp[second] += 1
    for part in messages:
        timestamp[part.send] = timestamp[part.receive] = timestamp[part.producer] + 1
    timestamp[second] -= 1
    return timestamp


def _timestamps_by_ends(subject: Subject, messages: Sequence[Messages], start: Starts) -> Int32s:
    """[num_instructions] timestamps by the rule that a message has its place where its maker ends."""
    all_messages = join_messages(messages)
    by_maker = np.argsort(all_messages.producer)
    makers = np.searchsorted(subject.action_row, all_messages.producer[by_maker])
    order = order_by_ends(subject.schedule, start, makers)
    position = np.empty(len(order), np.int32)
    position[order] = np.arange(len(order), dtype=np.int32)
    timestamp = np.full(subject.table.num_rows, NONE, np.int32)
    timestamp[subject.action_row] = position[: len(start)]
    timestamp[all_messages.send[by_maker]] = timestamp[all_messages.receive[by_maker]] = position[len(start) :]
    return timestamp


def _rank_keeps(rank: int, begin: int, end: int, rows: Rows, last_messages: LastMessages) -> int:
    """Return how many of the five conditions in the module's docstring one rank's rows keep: 5, 4, or 0.

    With 4 or more, logical timestamps show that the program cannot deadlock; only the transport model `coalesced` needs
    the fifth. It is 0 where one of the first four is broken: actions and sends in the order of their timestamps,
    receives before everything later, messages with one other rank in order, and collectives behind all of these.
    `begin` and `end` bound the rows of the rank. `last_messages` holds, per other rank, the timestamp of the last
    message; it is written.
    """
    op, roles, timestamp, peer, rank_of_stage = rows
    last_message_time, written_by_rank = last_messages.time, last_messages.written_by
    last_time, last_time_with_receives = -1, -1
    has_joined = False
    num_conditions = 5
    for row in range(begin, end):
        role = roles[op[row]]
        if role > RECEIVE:
            has_joined = has_joined or role == JOIN
            continue
        time = timestamp[row]
        if has_joined or time < last_time:  # `last_time` leaves receives out, so this breaks 1, 2 or 4
            return 0
        if time < last_time_with_receives:  # with receives, this breaks 5
            num_conditions = 4
        last_time_with_receives = max(time, last_time_with_receives)
        if role != RECEIVE:
            last_time = time
        if role != COMPUTE:
            peer_rank = rank_of_stage[peer[row]]
            # Condition 3: messages of a pair of ranks are in order. An entry that an earlier rank wrote is stale: to
            # compare ranks is cheaper than to clear all entries for each rank.
            if written_by_rank[peer_rank] == rank and time < last_message_time[peer_rank]:
                return 0
            written_by_rank[peer_rank] = rank
            last_message_time[peer_rank] = time
    return num_conditions


def _all_keep(offsets: Any, rows: Rows, last_messages: LastMessages) -> int:
    num_conditions = 5
    for rank in range(len(offsets) - 1):
        num_of_rank = _rank_keeps(rank, offsets[rank], offsets[rank + 1], rows, last_messages)
        if num_of_rank < num_conditions:
            num_conditions = num_of_rank
        if num_conditions == 0:
            break
    return num_conditions


_COUNT_CONDITIONS = Hot(_all_keep, _rank_keeps)
