"""Proof 3, the short way: a program whose messages keep the common order of its actions deadlocks nowhere.

All actions have one common order that keeps every dependency (`ir.common_order`), and a message has its moment in it:
right after the action that makes it. Give each action and message its moment, and suppose that on every rank

1. actions and sends stand in the order of their moments,
2. each receive stands in front of all actions and sends with later moments than its message,
3. the sends and receives of a pair of ranks stand in the order of their moments,
4. collectives that join ranks stand behind all actions and messages.

Then whatever an action or message waits for, under rendezvous, under any buffer and in a single queue per pair of
ranks, has an earlier moment: so there is no circle of waits. A send stands behind what makes its message by 1, a
receive in front of its consumer by 2, and every channel keeps its order by 3. The lowering makes such programs. Others
may run as well: for them, `channels` and `transports` look at each model on its own.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.ir.common_order import Starts, common_order
from penstock.ir.deps import NONE
from penstock.ir.hot import Hot
from penstock.ir.operations import IS_COMPUTE, IS_MESSAGE, IS_RECEIVE, JOINS_RANKS
from penstock.ir.program import Program
from penstock.proofs.channels import Messages
from penstock.proofs.order import Actions
from penstock.proofs.report import Subject


class Rows(NamedTuple):
    """The columns that count here, the roles of operations by their number, and the rank of each stage."""

    op: Any
    is_message: Any
    is_receive: Any
    is_timed: Any
    joins_ranks: Any
    moment: Any
    peer: Any
    rank_of_stage: Any


class Seen(NamedTuple):
    """The moment of the last message to or from each other rank, and of which rank's messages it was."""

    last_message: Any
    seen_by: Any


def keeps_common_order(subject: Subject, actions: Actions, messages: Messages, start: Starts) -> bool:
    """Return whether 1 to 4 hold, where `start` are the starts of the actions in an untimed walk."""
    program = subject.table
    assert isinstance(program, Program)
    moment = _moments(program, actions, messages, start)
    is_timed = IS_COMPUTE | IS_MESSAGE
    rows = Rows(program.op, IS_MESSAGE, IS_RECEIVE, is_timed, JOINS_RANKS, moment, program.peer, subject.rank_of_stage)
    seen = Seen(np.zeros(program.num_ranks, np.int64), np.full(program.num_ranks, NONE, np.int64))
    return bool(_KEEP(program.num_instructions, program.offsets, rows, seen))


def _moments(program: Program, actions: Actions, messages: Messages, start: Starts) -> NDArray[np.int32]:
    """[num_instructions] moments: even for actions, odd for both ends of the message that the action makes."""
    moment = np.full(program.num_instructions, NONE, np.int32)
    moment[actions.row[common_order(start)]] = np.arange(0, 2 * len(start), 2, dtype=np.int32)
    made = moment[messages.producer] + 1
    moment[messages.send] = made
    moment[messages.receive] = made
    first = np.flatnonzero(program.joined)
    moment[first + 1] = moment[first]  # both messages of a pair leave behind the pair
    return moment


def _rank_keeps(rank: int, begin: int, end: int, rows: Rows, seen: Seen) -> bool:
    """Look at one rank's rows in order; `last_message[other]` counts where `seen_by[other]` is the rank itself."""
    op, is_message, is_receive, is_timed, joins_ranks, moment, peer, rank_of_stage = rows
    last_message, seen_by = seen
    last = -1
    has_joined = False
    for row in range(begin, end):
        code = op[row]
        if not is_timed[code]:
            has_joined = has_joined or joins_ranks[code]
            continue
        now = moment[row]
        if has_joined or now < last:
            return False
        if not is_receive[code]:
            last = now
        if is_message[code]:
            other = rank_of_stage[peer[row]]
            if seen_by[other] == rank and now < last_message[other]:
                return False
            seen_by[other] = rank
            last_message[other] = now
    return True


def _all_keep(offsets: Any, rows: Rows, seen: Seen) -> bool:
    for rank in range(len(offsets) - 1):
        begin, end = offsets[rank], offsets[rank + 1]
        if not _rank_keeps(rank, begin, end, rows, seen):
            return False
    return True


_KEEP = Hot(_all_keep, _rank_keeps)
