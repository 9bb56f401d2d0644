"""Proof 3, the short way: a program whose messages keep the common order of its actions deadlocks nowhere.

All actions have one common order that keeps every dependency (`ir.common_order`), and a message has its moment in it:
right after the action that makes it, or where that action ends. Give each action and message its moment by either rule,
and suppose that on every rank

1. actions and sends stand in the order of their moments,
2. each receive stands in front of all actions and sends with later moments than its message,
3. the sends and receives of a pair of ranks stand in the order of their moments,
4. collectives that join ranks stand behind all actions and messages.

Then whatever an action or message waits for, under every model but `coalesced`, has an earlier moment: so there is no
circle of waits. A send stands behind what makes its message by 1, a receive in front of its consumer by 2, and every
channel keeps its order by 3. If also

5. receives stand in the order of their moments among all actions and messages of their rank,

there is none under `coalesced` either. The last moment of a group is earlier than the action behind it. Its end waits
for the start of the groups at the other ends of its messages. Each of those starts behind an action and a group whose
moments are earlier than that of the message which the two groups share.

The lowering makes programs that keep 1 to 4, and 5 where it is asked to. Others may run as well: for them, `channels`
and `transports` look at each model on its own.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.ir.common_order import Starts, common_order, order_by_ends
from penstock.ir.deps import NONE
from penstock.ir.hot import Hot
from penstock.ir.operations import IS_COMPUTE, IS_RECEIVE, IS_SEND, JOINS_RANKS
from penstock.ir.program import Program
from penstock.ir.transports import COALESCED, TransportModel
from penstock.proofs.channels import Messages
from penstock.proofs.order import Actions
from penstock.proofs.report import Subject

COMPUTE, SEND, RECEIVE, JOIN, OTHER = range(5)
ROLES = np.select([IS_COMPUTE, IS_SEND, IS_RECEIVE, JOINS_RANKS], [COMPUTE, SEND, RECEIVE, JOIN], OTHER).astype(np.int8)
"""[NUM_OPS] what an operation is to this proof."""


@dataclass(frozen=True, slots=True)
class CommonOrder:
    """Whether a program keeps the common order."""

    is_kept: bool
    """Whether 1 to 4 hold."""
    is_kept_by_receives: bool
    """Whether 5 holds as well."""

    @classmethod
    def of(
        cls, subject: Subject, actions: Actions, messages: Messages, start: Starts, *, is_grouped: bool = True
    ) -> "CommonOrder":
        """Look at a program; `start` are the starts of its actions in an untimed walk.

        Without `is_grouped`, condition 5 is of no interest.
        """
        num_kept = _num_kept(subject, _moments(subject, actions, messages, start))
        if num_kept < (5 if is_grouped else 4):
            num_kept = max(num_kept, _num_kept(subject, _moments_by_ends(subject, actions, messages, start)))
        return cls(num_kept >= 4, num_kept == 5)

    def proves(self, model: TransportModel) -> bool:
        """Whether the program ends under the model, by this alone."""
        return self.is_kept_by_receives if model == COALESCED else self.is_kept


class Rows(NamedTuple):
    """The columns that count here, the roles of operations by their number, and the rank of each stage."""

    op: Any
    roles: Any
    moment: Any
    peer: Any
    rank_of_stage: Any


class Seen(NamedTuple):
    """The moment of the last message to or from each other rank, and of which rank's messages it was."""

    last_message: Any
    seen_by: Any


def _num_kept(subject: Subject, moment: NDArray[Any]) -> int:
    program = subject.table
    assert isinstance(program, Program)
    rows = Rows(program.op, ROLES, moment, program.peer, subject.rank_of_stage)
    seen = Seen(np.zeros(program.num_ranks, np.int64), np.full(program.num_ranks, NONE, np.int64))
    return int(_KEEP(program.num_instructions, program.offsets, rows, seen))


def _moments(subject: Subject, actions: Actions, messages: Messages, start: Starts) -> NDArray[np.int32]:
    """[num_instructions] moments: even for actions, odd for both ends of the message that the action makes."""
    moment = np.full(subject.num_rows, NONE, np.int32)
    moment[actions.row[common_order(start)]] = np.arange(0, 2 * len(start), 2, dtype=np.int32)
    made = moment[messages.producer] + 1
    moment[messages.send] = made
    moment[messages.receive] = made
    first = np.flatnonzero(subject.table.joined)
    moment[first + 1] = moment[first]  # both messages of a pair leave behind the pair
    return moment


def _moments_by_ends(subject: Subject, actions: Actions, messages: Messages, start: Starts) -> NDArray[np.int32]:
    """[num_instructions] moments in the order in which messages stand where their makers end."""
    by_maker = np.argsort(messages.producer)
    makers = np.searchsorted(actions.row, messages.producer[by_maker])
    order = order_by_ends(actions.schedule, start, makers)
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    moment = np.full(subject.num_rows, NONE, np.int32)
    moment[actions.row] = place[: len(start)]
    moment[messages.send[by_maker]] = moment[messages.receive[by_maker]] = place[len(start) :]
    return moment


def _rank_keeps(rank: int, begin: int, end: int, rows: Rows, seen: Seen) -> int:
    """Look at one rank's rows in order; `last_message[other]` counts where `seen_by[other]` is the rank itself.

    Return how many of the conditions hold: 5, 4, or 0 where one of the first four does not.
    """
    op, roles, moment, peer, rank_of_stage = rows
    last_message, seen_by = seen
    last, last_with_receives = -1, -1
    has_joined = False
    kept = 5
    for row in range(begin, end):
        role = roles[op[row]]
        if role > RECEIVE:
            has_joined = has_joined or role == JOIN
            continue
        now = moment[row]
        if has_joined or now < last:
            return 0
        if now < last_with_receives:
            kept = 4
        last_with_receives = max(now, last_with_receives)
        if role != RECEIVE:
            last = now
        if role != COMPUTE:
            other = rank_of_stage[peer[row]]
            if seen_by[other] == rank and now < last_message[other]:
                return 0
            seen_by[other] = rank
            last_message[other] = now
    return kept


def _all_keep(offsets: Any, rows: Rows, seen: Seen) -> int:
    kept = 5
    for rank in range(len(offsets) - 1):
        of_rank = _rank_keeps(rank, offsets[rank], offsets[rank + 1], rows, seen)
        if of_rank < kept:
            kept = of_rank
        if kept == 0:
            break
    return kept


_KEEP = Hot(_all_keep, _rank_keeps)
