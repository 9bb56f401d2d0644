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
    """Columns by the number of an operation, [num_ops] each: how it uses slots."""

    names_slot: Any
    takes_activation: Any
    frees_activation: Any
    is_send: Any
    is_receive: Any
    direction_moved: Any
    """The direction of the message that it sends or receives, an index among `MESSAGES`; -1 for none."""
    direction_made: Any
    direction_consumed: Any


class Rows(NamedTuple):
    """Columns of the program, [num_rows] each."""

    op: Any
    joined: Any
    identity: Any
    slot: Any
    """The result, which the loops fill in."""


class Cells(NamedTuple):
    """The slots in use, by the identity of a (stage, microbatch, slice)."""

    is_sent: Any
    """[2, num_cells] whether a send takes the message of this direction to another rank."""
    activation_slot: Any
    """[num_cells]"""
    received_slot: Any
    """[2, num_cells] the receive slot plus 1, by direction; 0 where nothing was received."""
    send_slot: Any
    """[2, num_cells] the send slot, by direction."""


class Pools(NamedTuple):
    """The pools of one rank: activation slots, receive slots and send slots."""

    free: Any
    """[num_pools, n] a stack of free slots for each pool, of which `num_free` count."""
    num_free: Any
    num_used: Any
    """[num_pools] how many slots the rank has used so far."""


def assign_slots(program: Program) -> Program:
    """Fill the column `slot`; each rank uses as few slots of a pool as are alive at once, the one freed last first."""
    num_rows = program.num_instructions
    identity = identities(program)
    num_cells = num_identities(program) + 1
    slot = np.zeros(num_rows, np.int32)
    longest = int(np.diff(program.offsets).max(initial=0))
    by_direction = (2, num_cells)
    cells = Cells(
        is_sent=np.zeros(by_direction, np.bool_),
        activation_slot=np.zeros(num_cells, np.int32),
        received_slot=np.zeros(by_direction, np.int32),
        send_slot=np.zeros(by_direction, np.int32),
    )
    counts = np.zeros((2, NUM_POOLS), np.int64)
    pools = Pools(np.zeros((NUM_POOLS, longest + 1), np.int32), num_free=counts[0], num_used=counts[1])
    rows = Rows(program.op, program.joined, identity, slot)
    # Without backwards an activation is not kept: its forward is also its last use.
    frees_activation = BEGINS_KEEPING if program.is_forward_only else ENDS_KEEPING
    rules = Rules(NAMES_SLOT, BEGINS_KEEPING, frees_activation, IS_SEND, IS_RECEIVE, MOVED, MADE, TAKEN)
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
    """Give the rows `begin` to `end` of one rank their slots: numbers of buffers, in three pools per rank.

    Activations, received messages and messages to send have a pool each. Rows run in order: a row takes the slots that
    it needs, and frees after it what no later row reads. `rules` says, by the number of an operation, what it takes and
    frees. A cell is one (stage, microbatch, slice); `cells` remembers the slots that each cell has in use. A direction
    is the kind of a message: an activation or a gradient; -1 means that an operation has none. The slots go into the
    column `rows.slot`.
    """
    op, joined, cell_of_row, slot = rows
    free, num_free, num_used = pools
    for row in range(begin, end):
        operation, cell = op[row], cell_of_row[row]
        # Take the slots of this row.
        if rules.names_slot[operation]:
            if rules.takes_activation[operation]:
                cells.activation_slot[cell] = _take_slot(ACTIVATION, free, num_free, num_used)
            # A backward names the slot of its forward, so that the runtime finds what the forward has saved.
            slot[row] = cells.activation_slot[cell]
            direction = rules.direction_made[operation]
            if direction >= 0 and cells.is_sent[direction, cell]:
                # A result without a send stays on this rank, and needs no buffer.
                cells.send_slot[direction, cell] = _take_slot(SEND, free, num_free, num_used)
        elif rules.is_send[operation]:
            slot[row] = cells.send_slot[rules.direction_moved[operation], cell]
        elif rules.is_receive[operation]:
            slot[row] = _take_slot(RECEIVE, free, num_free, num_used)
            cells.received_slot[rules.direction_moved[operation], cell] = slot[row] + 1  # 0 stands for none
        if joined[row]:
            continue  # a pair frees after its second row: neither may reuse what the other still reads
        # Free what this row, or both rows of a pair, read last.
        first = row - 1 if row > begin and joined[row - 1] else row
        for member in range(first, row + 1):
            operation = op[member]
            if rules.frees_activation[operation]:
                _give_slot(ACTIVATION, slot[member], free, num_free)
            # Nothing was received where a stage of this rank made the value, or where the stage is the first one.
            direction = rules.direction_consumed[operation]
            received = cells.received_slot[direction, cell_of_row[member]] if direction >= 0 else 0
            if received > 0:
                _give_slot(RECEIVE, received - 1, free, num_free)
            if rules.is_send[operation]:
                _give_slot(SEND, slot[member], free, num_free)


def _assign_all(offsets: Any, rows: Rows, rules: Rules, cells: Cells, pools: Pools) -> None:
    """Find out which messages are sent, then fill in the slots of one rank after the other, from empty pools."""
    for row in range(len(rows.op)):
        code = rows.op[row]
        if rules.is_send[code]:
            cells.is_sent[rules.direction_moved[code], rows.identity[row]] = True
    for rank in range(len(offsets) - 1):
        for pool in range(NUM_POOLS):
            pools.num_free[pool] = 0
            pools.num_used[pool] = 0
        _assign_rank(offsets[rank], offsets[rank + 1], rows, rules, cells, pools)


_ASSIGN = Hot(_assign_all, _assign_rank, _take_slot, _give_slot)
