"""Pass: add a send after each action whose result leaves the rank, and a receive where it is surely in time.

    Before                       After
    0F0 0F1 0B0 0B1              0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    1F0 1B0 1F1 1B1              1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1

Why this cannot deadlock: an untimed walk gives all actions of all ranks one linear extension, by (start, rank), that
keeps every dependency. Each message has one place in it, right after the action that makes it. Its receive is before
the first later action of the receiving rank, hence before its consumer. So all sends and receives between two ranks, of
both directions, keep that order at both ends. The earliest open message can always move, under every transport model
of `ir.transports`.

Under `coalesced` a message waits for the others of its group, so it would be late if it were received too early. There
both ends are where its maker ends, after all actions that start earlier. That too is one order of all actions and
messages, and a group waits only for what is earlier than its last message.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError
from penstock.ir.deps import NONE, peers_of_messages, predecessors
from penstock.ir.hot import Hot, blocks
from penstock.ir.linear_extension import Starts, linear_extension, order_by_ends, walk_untimed, whole_starts
from penstock.ir.operations import MADE, MESSAGES, Op
from penstock.ir.program import Program
from penstock.ir.table import Ints, short_type

ACTION, SEND, RECEIVE = range(3)
"""The roles of a row of the new program: it runs an action, or sends or receives the message that the action makes."""
_SEND_AND_RECEIVE = list(MESSAGES.values())
OP_BY_ROLE = np.array([(op, *(_SEND_AND_RECEIVE[MADE[op]] if MADE[op] >= 0 else (op, op))) for op in Op], np.int8).T
"""[3, num_ops] the operation of a row, by its role and the operation of its action.

An operation that makes no message has no row in the two other roles, and stands there for itself.
"""


def add_messages(program: Program, start: Starts | None = None, *, in_groups: bool = False) -> Program:
    """Add a send and a receive for each value that goes to another rank, to a program of compute instructions.

    All actions of all ranks have one order that keeps every dependency: by their starts in a walk in which a whole
    backward takes two units and all else one (`start`, if the caller knows them). In this order, the send and the
    receive come right after the action that makes the value. With `in_groups` they come where that action ends, for
    ranks that post all messages between two computations together.

    Raises:
        ScheduleError: if the order cannot run at all; `penstock.check` says why.
    """
    starts = _untimed_starts(program) if start is None else start
    peer = _receiver_stages(program)
    layout = _layout_of_rows(program, starts, peer, in_groups=in_groups)
    num_rows = len(layout.action)
    columns: dict[str, Any] = {name: np.zeros(num_rows, getattr(program, name).dtype) for name in Program.COLUMNS}
    columns_to_copy = [name for name in ("microbatch", "slice") if getattr(program, name).any()]  # zeros stay zeros
    has_pairs = bool(program.joined.any())
    # `layout` has, per new row, the action that it comes from and its role: that action, its send or its receive.
    for block in blocks(num_rows):
        action, role = layout.action[block].astype(np.intp), layout.role[block]
        maker_stage, receiver_stage = program.stage.take(action), peer.take(action)
        op_of_action = program.op.take(action)
        # `take` with flat indices is several times faster than OP_BY_ROLE[role, op_of_action], with the same result.
        columns["op"][block] = OP_BY_ROLE.take(len(Op) * role.astype(np.intp) + op_of_action)
        # A receive runs on the receiving stage with the maker as its peer; a send the other way around. The row of an
        # action has its own stage as its peer.
        columns["stage"][block] = np.where(role == RECEIVE, receiver_stage, maker_stage)
        columns["peer"][block] = np.where(role == SEND, receiver_stage, maker_stage)
        for name in columns_to_copy:
            columns[name][block] = getattr(program, name).take(action)
        if has_pairs:
            columns["joined"][block] = program.joined.take(action) & (role == ACTION)
    return replace(program, **columns, offsets=layout.offsets)


def _untimed_starts(program: Program) -> Starts:
    """[num_actions] the starts of an untimed walk of a program of actions."""
    walk = walk_untimed(program, predecessors(program))
    if not walk.is_complete:
        raise ScheduleError(f"{program.name}: the order cannot run to its end; check the schedule before lowering it")
    return whole_starts(walk)


def _receiver_stages(program: Program) -> Ints:
    """[num_actions] the stage on another rank that receives the message which the action makes, or `NONE`."""
    rank_of_stage = np.array(program.placement.rank_of_stage)
    # [num_ops, num_stages] the receiving stage by the operation and stage of an action
    receivers = peers_of_messages(program.placement)[OP_BY_ROLE[SEND]].astype(short_type(program.num_stages))
    receivers[MADE < 0] = NONE
    # Stages of one rank need no message. NONE indexes the last stage here, which does no harm: it is NONE either way.
    receivers[rank_of_stage[receivers] == rank_of_stage] = NONE
    receiver_of_action = np.empty(program.num_rows, receivers.dtype)
    for part in blocks(program.num_rows):
        flat_index = program.op[part].astype(np.intp) * program.num_stages + program.stage[part]
        receivers.reshape(-1).take(flat_index, out=receiver_of_action[part], mode="clip")
    return receiver_of_action


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """The rows of the new program, as columns."""

    action: NDArray[np.int32]
    """[num_rows] the row of the old program whose action, or message, the new row is about."""
    role: NDArray[np.int8]
    """[num_rows] ACTION, SEND or RECEIVE."""
    offsets: NDArray[np.int64]
    """[num_ranks + 1] where the rows of each rank begin, as in `Table`."""


def _layout_of_rows(program: Program, start: Starts, peer: Ints, *, in_groups: bool) -> _Layout:
    """Decide which rows each rank of the new program has; `peer` is the receiving stage of each action's message."""
    rank = program.rank_of_row
    rank_of_stage = np.array(program.placement.rank_of_stage, np.int32)
    receiver = np.append(rank_of_stage, np.int32(NONE)).take(peer, mode="wrap")  # NONE is -1: the entry appended
    counts = np.diff(program.offsets)  # rows of each rank: its actions, and one more for either end of a message
    for part in blocks(program.num_rows):
        sender = np.where(receiver[part] == NONE, NONE, rank[part])
        for rank_of_message in (sender, receiver[part]):
            # Ranks are counted from 1 on here, so that the actions without a message (NONE) fall into bin 0.
            counts += np.bincount(rank_of_message + 1, minlength=program.num_ranks + 1)[1:]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    layout = _Layout(np.zeros(offsets[-1], np.int32), np.zeros(offsets[-1], np.int8), offsets)
    rows = (rank, receiver, offsets[:-1].copy(), layout.action, layout.role)
    if in_groups:
        makers = np.flatnonzero(receiver != NONE)
        # `order_by_ends` knows where overlapped pairs end, so the loop need not.
        _LAY_OUT_GROUPS(program.num_instructions, order_by_ends(program, start, makers), makers, *rows)
    else:
        _LAY_OUT(program.num_instructions, linear_extension(start), program.joined, *rows)
    return layout


def _append(maker: int, on_rank: int, new_role: int, next_row: Any, action: Any, role: Any) -> None:
    """Append a row to a rank of the new program; `next_row` is the first free row of each rank."""
    action[next_row[on_rank]] = maker
    role[next_row[on_rank]] = new_role
    next_row[on_rank] += 1


def _lay_out_all(order: Any, joined: Any, rank: Any, receiver: Any, next_row: Any, action: Any, role: Any) -> None:
    """Append all actions, in the linear extension, to their ranks, each followed by the send and receive it causes.

    `rank` and `receiver` are the ranks that run an action and that receive its message; they are indexed by its row.
    """
    for row in order:
        _append(row, rank[row], 0, next_row, action, role)  # ACTION
        if joined[row]:
            continue  # its message leaves when its partner has run as well
        # Send and receive are appended at once, so two ranks have the messages between them in the same order.
        first = row - 1 if row > 0 and joined[row - 1] else row
        for maker in range(first, row + 1):
            if receiver[maker] >= 0:
                _append(maker, rank[row], 1, next_row, action, role)  # SEND
                _append(maker, receiver[maker], 2, next_row, action, role)  # RECEIVE


def _lay_out_groups(order: Any, makers: Any, rank: Any, receiver: Any, next_row: Any, action: Any, role: Any) -> None:
    """Append actions and messages to their ranks in the given order, in which message n is `num_actions + n`."""
    num_actions = len(rank)
    for event in order:
        if event < num_actions:
            _append(event, rank[event], 0, next_row, action, role)  # ACTION
        else:
            maker = makers[event - num_actions]
            _append(maker, rank[maker], 1, next_row, action, role)  # SEND
            _append(maker, receiver[maker], 2, next_row, action, role)  # RECEIVE


_LAY_OUT = Hot(_lay_out_all, _append)
_LAY_OUT_GROUPS = Hot(_lay_out_groups, _append)
