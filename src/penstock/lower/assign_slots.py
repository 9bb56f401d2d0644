"""Pass: give every saved activation and message a numbered slot of its rank, and reuse slots that are free again.

    Before (slots):  0F0:0 0F1:0 0B0:0 0F2:0 0B1:0 0B2:0
    After:           0F0:0 0F1:1 0B0:0 0F2:0 0B1:1 0B2:0

Three pools per rank. Activation slots: taken by F, freed by B or W (by F itself in a forward-only program). Receive
slots: taken by the receive, freed by its consumer. Send slots: taken by the action that makes the message, freed by the
send. The runtime holds as many buffers as there are slots, not one per microbatch.
"""

from typing import Any

import numpy as np

from penstock.ir.deps import identities, num_identities
from penstock.ir.hot import Hot
from penstock.ir.instruction import Op
from penstock.ir.program import Program

ACTIVATION, RECEIVE, SEND = range(3)
NUM_POOLS = 3


def assign_slots(program: Program) -> Program:
    """Fill the column `slot`; each rank uses as few slots of a pool as are alive at once, the one freed last first."""
    num_rows = program.num_instructions
    identity = identities(program)
    num_cells = num_identities(program) + 1
    is_sent = np.zeros((2, num_cells), np.bool_)
    for direction, op in enumerate((Op.SEND_FORWARD, Op.SEND_BACKWARD)):
        is_sent[direction, identity[program.op == op]] = True
    slot = np.zeros(num_rows, np.int32)
    longest = int(np.diff(program.offsets).max(initial=0))
    _ASSIGN(
        num_rows, program.offsets, program.op, program.joined, identity, is_sent, program.is_forward_only, slot,
        np.zeros(num_cells, np.int32), np.zeros((2, num_cells), np.int32), np.zeros((2, num_cells), np.int32),
        np.zeros((NUM_POOLS, longest + 1), np.int32), np.zeros(NUM_POOLS, np.int64), np.zeros(NUM_POOLS, np.int64),
    )  # fmt: skip
    return program.with_slots(slot)


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


def _assign_rank(
    begin: int, end: int, op: Any, joined: Any, identity: Any, is_sent: Any, forward_only: bool, slot: Any,
    kept: Any, arrived: Any, leaving: Any, free: Any, num_free: Any, num_used: Any,
) -> None:  # fmt: skip
    """Run one rank's rows; by identity, `kept`, `arrived` (plus 1) and `leaving` are slots in use."""
    for row in range(begin, end):
        code = op[row]
        key = identity[row]
        direction = 0 if code == 0 or code == 4 or code == 5 else 1  # FORWARD, SEND_FORWARD, RECEIVE_FORWARD
        if code == 0:
            kept[key] = _take_slot(0, free, num_free, num_used)
        if code <= 3:  # the computations
            slot[row] = kept[key]
        if code <= 2 and is_sent[direction, key]:  # not BACKWARD_WEIGHT
            leaving[direction, key] = _take_slot(2, free, num_free, num_used)
        if code == 4 or code == 6:  # SEND_FORWARD, SEND_BACKWARD
            slot[row] = leaving[direction, key]
        if code == 5 or code == 7:  # RECEIVE_FORWARD, RECEIVE_BACKWARD
            slot[row] = _take_slot(1, free, num_free, num_used)
            arrived[direction, key] = slot[row] + 1
        if joined[row]:
            continue  # joined rows run together: neither may use what the other frees
        first = row - 1 if row > begin and joined[row - 1] else row
        for member in range(first, row + 1):
            code = op[member]
            if code == 1 or code == 3 or (code == 0 and forward_only):  # BACKWARD, BACKWARD_WEIGHT
                _give_slot(0, slot[member], free, num_free)
            came = arrived[1 if code > 0 else 0, identity[member]] if code <= 2 else 0
            if came > 0:
                _give_slot(1, came - 1, free, num_free)
            if code == 4 or code == 6:  # SEND_FORWARD, SEND_BACKWARD
                _give_slot(2, slot[member], free, num_free)


def _assign_all(
    offsets: Any, op: Any, joined: Any, identity: Any, is_sent: Any, forward_only: bool, slot: Any,
    kept: Any, arrived: Any, leaving: Any, free: Any, num_free: Any, num_used: Any,
) -> None:  # fmt: skip
    for rank in range(len(offsets) - 1):
        for pool in range(len(num_free)):
            num_free[pool] = 0
            num_used[pool] = 0
        _assign_rank(
            offsets[rank], offsets[rank + 1], op, joined, identity, is_sent, forward_only, slot,
            kept, arrived, leaving, free, num_free, num_used,
        )  # fmt: skip


_ASSIGN = Hot(_assign_all, _assign_rank, _take_slot, _give_slot)
