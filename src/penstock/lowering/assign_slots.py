"""Pass: give every saved activation and message a numbered slot of its rank, and reuse slots that are free again.

    Before (slots):  0F0:0 0F1:0 0B0:0 0F2:0 0B1:0 0B2:0
    After:           0F0:0 0F1:1 0B0:0 0F2:0 0B1:1 0B2:0

Three pools per rank. Activation slots: taken by F, freed by B or W (by F itself in a forward-only program). Receive
slots: taken by the receive, freed by its consumer. Send slots: taken by the action that makes the message, freed by the
send. The runtime holds as many buffers as there are slots, not one per microbatch.
"""

from typing import Any, NamedTuple

import numpy as np

from penstock.ir.deps import identities, num_identities
from penstock.ir.hot import Hot
from penstock.ir.operations import BEGINS_KEEPING, ENDS_KEEPING, IS_RECEIVE, IS_SEND, MADE, MOVED, NAMES_SLOT, TAKEN
from penstock.ir.program import Program
from penstock.ir.table import short_type

ACTIVATION, RECEIVE, SEND = range(3)
NUM_POOLS = 3


class Rules(NamedTuple):
    """The properties of operations that count here, by their number."""

    names_slot: Any
    begins: Any
    ends: Any
    sends: Any
    receives: Any
    moved: Any
    made: Any
    taken: Any


class Rows(NamedTuple):
    """The columns of the program that count here, the last of which is filled in."""

    op: Any
    joined: Any
    identity: Any
    slot: Any


class Cells(NamedTuple):
    """By identity: whether its message is sent, [direction, identity], and the slots in use, of messages by direction.

    `arrived` is a slot plus 1, and 0 where nothing came.
    """

    is_sent: Any
    kept: Any
    arrived: Any
    leaving: Any


class Pools(NamedTuple):
    """Of one rank: the slots that are free again, in the order they became so, and the counts, by pool."""

    free: Any
    num_free: Any
    num_used: Any


def assign_slots(program: Program) -> Program:
    """Fill the column `slot`; each rank uses as few slots of a pool as are alive at once, the one freed last first."""
    num_rows = program.num_instructions
    identity = identities(program)
    num_cells = num_identities(program) + 1
    slot = np.zeros(num_rows, np.int32)
    longest = int(np.diff(program.offsets).max(initial=0))
    messages = (2, num_cells)
    is_sent, kept = np.zeros(messages, np.bool_), np.zeros(num_cells, np.int32)
    cells = Cells(is_sent, kept, np.zeros(messages, np.int32), np.zeros(messages, np.int32))
    counts = np.zeros((2, NUM_POOLS), np.int64)
    pools = Pools(np.zeros((NUM_POOLS, longest + 1), np.int32), counts[0], counts[1])
    rows = Rows(program.op, program.joined, identity, slot)
    # Without backwards an activation is not kept: its forward is also its last use.
    ends = BEGINS_KEEPING if program.is_forward_only else ENDS_KEEPING
    rules = Rules(NAMES_SLOT, BEGINS_KEEPING, ends, IS_SEND, IS_RECEIVE, MOVED, MADE, TAKEN)
    _ASSIGN(num_rows, program.offsets, rows, rules, cells, pools)
    return program.with_slots(slot.astype(short_type(int(slot.max(initial=0)))))


def _take_slot(pool: int, free: Any, num_free: Any, num_used: Any) -> int:
    """Take the slot that was freed last, or one that was never used."""
    if num_free[pool] == 0:
        num_used[pool] += 1
        slot: int = num_used[pool] - 1
    else:
        num_free[pool] -= 1
        slot = free[pool, num_free[pool]]
    return slot


def _give_slot(pool: int, slot: int, free: Any, num_free: Any) -> None:
    """Give a slot back; a row gives back at most one of each pool, so there is room for whatever a rank does."""
    free[pool, num_free[pool]] = slot
    num_free[pool] += 1


def _assign_rank(begin: int, end: int, rows: Rows, rules: Rules, cells: Cells, pools: Pools) -> None:
    """Run one rank's rows."""
    op, joined, identity, slot = rows
    names_slot, begins, ends, sends, receives, moved, made, taken = rules
    is_sent, kept, arrived, leaving = cells
    free, num_free, num_used = pools
    for row in range(begin, end):
        code = op[row]
        key = identity[row]
        if names_slot[code]:
            if begins[code]:
                kept[key] = _take_slot(ACTIVATION, free, num_free, num_used)
            # Later rows name the slot of their F, so that the runtime finds what was saved.
            slot[row] = kept[key]
            if made[code] >= 0 and is_sent[made[code], key]:
                # A result without a send stays on this rank, and needs no buffer.
                leaving[made[code], key] = _take_slot(SEND, free, num_free, num_used)
        elif sends[code]:
            slot[row] = leaving[moved[code], key]
        elif receives[code]:
            slot[row] = _take_slot(RECEIVE, free, num_free, num_used)
            arrived[moved[code], key] = slot[row] + 1
        if joined[row]:
            continue  # a pair frees after its second row: neither may reuse what the other still reads
        first = row - 1 if row > begin and joined[row - 1] else row
        for member in range(first, row + 1):
            code = op[member]
            if ends[code]:
                _give_slot(ACTIVATION, slot[member], free, num_free)
            # 0 where nothing was received: a stage of this rank made the value, or the route begins here.
            came = arrived[taken[code], identity[member]] if taken[code] >= 0 else 0
            if came > 0:
                _give_slot(RECEIVE, came - 1, free, num_free)
            if sends[code]:
                _give_slot(SEND, slot[member], free, num_free)


def _assign_all(offsets: Any, rows: Rows, rules: Rules, cells: Cells, pools: Pools) -> None:
    for row in range(len(rows.op)):
        code = rows.op[row]
        if rules.sends[code]:
            cells.is_sent[rules.moved[code], rows.identity[row]] = True
    for rank in range(len(offsets) - 1):
        for pool in range(NUM_POOLS):
            pools.num_free[pool] = 0
            pools.num_used[pool] = 0
        _assign_rank(offsets[rank], offsets[rank + 1], rows, rules, cells, pools)


_ASSIGN = Hot(_assign_all, _assign_rank, _take_slot, _give_slot)
