"""Pass: give every saved activation and message a numbered slot of its rank, and reuse slots that are free again.

    Before (slots):  0F0:0 0F1:0 0B0:0 0F2:0 0B1:0 0B2:0
    After:           0F0:0 0F1:1 0B0:0 0F2:0 0B1:1 0B2:0

Three pools per rank. Activation slots: taken by F, freed by B or W (by F itself in a forward-only program). Receive
slots: taken by the receive, freed by its consumer. Send slots: taken by the action that makes the message, freed by the
send. The runtime holds as many buffers as there are slots, not one per microbatch.
"""

from typing import Any

import numpy as np

from penstock.ir.deps import predecessors
from penstock.ir.hot import Hot
from penstock.ir.instruction import Op
from penstock.ir.program import Program

ACTIVATION, RECEIVE, SEND = range(3)
NUM_POOLS = 3


def assign_slots(program: Program) -> Program:
    """Fill the column `slot`; each rank uses as few slots of a pool as are alive at once, the one freed last first."""
    num_rows = program.num_instructions
    before = predecessors(program)
    # The send row, if any, that each producing row feeds.
    sends = np.flatnonzero(np.isin(program.op, (Op.SEND_FORWARD, Op.SEND_BACKWARD)) & (before[:, 0] >= 0))
    feeds = np.full(num_rows, -1, np.int64)
    feeds[before[sends, 0]] = sends
    slot = np.zeros(num_rows, np.int32)
    longest = int(np.diff(program.offsets).max(initial=0))
    _ASSIGN(
        num_rows, program.offsets, program.op, program.joined, before, feeds, program.is_forward_only, slot,
        np.zeros((NUM_POOLS, longest + 1), np.int32), np.zeros(NUM_POOLS, np.int64),
    )  # fmt: skip
    return program.with_slots(slot)


def _take_slot(pool: int, free: Any, num_free: Any) -> int:
    """Take a slot from the stack of free ones; the stack's bottom numbers have never been used."""
    num_free[pool] -= 1
    return int(free[pool, num_free[pool]])


def _give_slot(pool: int, slot: int, free: Any, num_free: Any) -> None:
    """Give a slot back; a program that frees more than it takes is for `check` to refuse, not to crash on."""
    if num_free[pool] < free.shape[1]:
        free[pool, num_free[pool]] = slot
        num_free[pool] += 1


def _take_for_row(row: int, op: Any, before: Any, feeds: Any, slot: Any, free: Any, num_free: Any) -> None:
    """Give the row the slots that it needs from its start on."""
    code = op[row]
    if code == 0:  # FORWARD
        slot[row] = _take_slot(0, free, num_free)
    elif (code == 1 or code == 2) and before[row, 1] >= 0:  # BACKWARD, BACKWARD_INPUT: their forward's
        slot[row] = slot[before[row, 1]]
    elif code == 3 and before[row, 0] >= 0:  # BACKWARD_WEIGHT: its input part's
        slot[row] = slot[before[row, 0]]
    elif code == 5 or code == 7:  # RECEIVE_FORWARD, RECEIVE_BACKWARD
        slot[row] = _take_slot(1, free, num_free)
    if code <= 2 and feeds[row] >= 0:
        slot[feeds[row]] = _take_slot(2, free, num_free)


def _free_after_row(row: int, op: Any, before: Any, forward_only: bool, slot: Any, free: Any, num_free: Any) -> None:
    """Give back what nobody needs once the row has ended."""
    code = op[row]
    source = before[row, 0]
    if code == 1 or code == 3 or (code == 0 and forward_only):  # BACKWARD, BACKWARD_WEIGHT
        _give_slot(0, slot[row], free, num_free)
    elif code == 4 or code == 6:  # SEND_FORWARD, SEND_BACKWARD
        _give_slot(2, slot[row], free, num_free)
    if code <= 2 and source >= 0 and (op[source] == 5 or op[source] == 7):
        _give_slot(1, slot[source], free, num_free)


def _assign_all(
    offsets: Any, op: Any, joined: Any, before: Any, feeds: Any, forward_only: bool, slot: Any, free: Any, num_free: Any
) -> None:
    size = free.shape[1]
    for rank in range(len(offsets) - 1):
        for pool in range(len(num_free)):
            num_free[pool] = size
            for index in range(size):
                free[pool, index] = size - 1 - index
        row = offsets[rank]
        while row < offsets[rank + 1]:
            last = row + 1 if joined[row] else row  # joined rows run together: neither may use what the other frees
            for member in range(row, last + 1):
                _take_for_row(member, op, before, feeds, slot, free, num_free)
            for member in range(row, last + 1):
                _free_after_row(member, op, before, forward_only, slot, free, num_free)
            row = last + 1


_ASSIGN = Hot(_assign_all, _take_for_row, _free_after_row, _take_slot, _give_slot)
