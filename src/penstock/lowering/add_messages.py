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
"""A row of the new program does this with an action: run it, or move its message at either end."""
_ENDS = [(op, *list(MESSAGES.values())[MADE[op]]) if MADE[op] >= 0 else (op, op, op) for op in Op]
OPS = np.array(_ENDS, np.int8).T
"""[3, num_ops] by what is done with an action, and its own operation; one without a message has no ends."""


def add_messages(program: Program, start: Starts | None = None, *, in_groups: bool = False) -> Program:
    """Add sends and receives to a program of compute instructions.

    `start` are the starts of an untimed walk, where they are known already. `in_groups` puts both ends of a message
    where its maker ends, for ranks whose messages between two computations travel together.

    Raises:
        ScheduleError: if the order cannot run at all; `penstock.check` says why.
    """
    starts = _starts(program) if start is None else start
    peer = _peers(program)
    layout = _lay_out(program, starts, peer, in_groups=in_groups)
    num_rows = len(layout.action)
    columns: dict[str, Any] = {name: np.zeros(num_rows, getattr(program, name).dtype) for name in Program.COLUMNS}
    copied = [name for name in ("microbatch", "slice") if getattr(program, name).any()]  # the others stay 0
    has_pairs = bool(program.joined.any())
    for part in blocks(num_rows):
        action, role = layout.action[part].astype(np.intp), layout.role[part]
        stage, other = program.stage.take(action), peer.take(action)
        columns["op"][part] = OPS.take(len(Op) * role.astype(np.intp) + program.op.take(action))
        columns["stage"][part] = np.where(role == RECEIVE, other, stage)
        columns["peer"][part] = np.where(role == SEND, other, stage)
        for name in copied:
            columns[name][part] = getattr(program, name).take(action)
        if has_pairs:
            columns["joined"][part] = program.joined.take(action) & (role == ACTION)
    return replace(program, **columns, offsets=layout.offsets)


def _starts(program: Program) -> Starts:
    walked = walk_untimed(program, predecessors(program))
    if not walked.is_complete:
        raise ScheduleError(f"{program.name}: the order cannot run to its end; check the schedule before lowering it")
    return whole_starts(walked)


def _peers(program: Program) -> Ints:
    """[num_instructions] the stage on another rank that gets what the row makes, or `NONE`."""
    rank_of_stage = np.array(program.placement.rank_of_stage)
    receivers = peers_of_messages(program.placement)[OPS[SEND]].astype(short_type(program.num_stages))
    receivers[MADE < 0] = NONE
    # Stages of one rank need no message. NONE indexes the last stage here, which does no harm: it is NONE either way.
    receivers[rank_of_stage[receivers] == rank_of_stage] = NONE
    found = np.empty(program.num_rows, receivers.dtype)
    for part in blocks(program.num_rows):
        key = program.op[part].astype(np.intp) * program.num_stages + program.stage[part]
        receivers.reshape(-1).take(key, out=found[part], mode="clip")
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """The rows of the new program: the action, a row of the old one, and what is done with it."""

    action: NDArray[np.int32]
    role: NDArray[np.int8]
    offsets: NDArray[np.int64]


def _lay_out(program: Program, start: Starts, peer: Ints, *, in_groups: bool) -> _Layout:
    rank = program.rank_of_row
    rank_of_stage = np.array(program.placement.rank_of_stage, np.int32)
    receiver = np.append(rank_of_stage, np.int32(NONE)).take(peer, mode="wrap")  # NONE is -1: the entry appended
    counts = np.diff(program.offsets)
    for part in blocks(program.num_rows):
        sender = np.where(receiver[part] == NONE, NONE, rank[part])
        for end in (sender, receiver[part]):  # a message takes one row on the rank of either end
            counts += np.bincount(end + 1, minlength=program.num_ranks + 1)[1:]
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


def _put(row: int, to: int, what: int, end: Any, action: Any, role: Any) -> None:
    """Put an action, or one end of its message, at the end of a rank."""
    action[end[to]] = row
    role[end[to]] = what
    end[to] += 1


def _lay_out_all(order: Any, joined: Any, rank: Any, receiver: Any, end: Any, action: Any, role: Any) -> None:
    """Put the rows, in the linear extension, at the end of their ranks; a message at the ends of two ranks at once."""
    for row in order:
        own = rank[row]
        _put(row, own, 0, end, action, role)  # ACTION
        if joined[row]:
            continue  # its message leaves when its partner has run as well
        # Both ends are put at once, so two ranks have the messages between them in the same order.
        first = row - 1 if row > 0 and joined[row - 1] else row
        for maker in range(first, row + 1):
            if receiver[maker] >= 0:
                _put(maker, own, 1, end, action, role)  # SEND
                _put(maker, receiver[maker], 2, end, action, role)  # RECEIVE


def _lay_out_groups(order: Any, makers: Any, rank: Any, receiver: Any, end: Any, action: Any, role: Any) -> None:
    """Put actions, and messages (numbered from `num_actions` on), in their order at the ends of their ranks."""
    num_actions = len(rank)
    for event in order:
        if event < num_actions:
            _put(event, rank[event], 0, end, action, role)  # ACTION
        else:
            maker = makers[event - num_actions]
            _put(maker, rank[maker], 1, end, action, role)  # SEND
            _put(maker, receiver[maker], 2, end, action, role)  # RECEIVE


_LAY_OUT = Hot(_lay_out_all, _put)
_LAY_OUT_GROUPS = Hot(_lay_out_groups, _put)
