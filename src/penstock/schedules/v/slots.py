"""Tables of slots: what each rank of a V runs in each unit of time, while a schedule is being made from a block.

A table is an int8 array [num_ranks, num_slots] of `Pass`es, 0 where a rank idles. Microbatches are not written down: on
every rank each pass takes them in ascending order. Two ranks, one microbatch, `WEIGHT` written as w:

    rank 0:  F  .  .  f  b  w  .  B  w        F f  forward of the earlier and of the later stage
    rank 1:  .  F  f  .  .  b  B  w  w        b B  backward of the later and of the earlier stage
"""

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.action import Kind
from penstock.ir.deps import NONE
from penstock.ir.walk import walk

Slots = NDArray[np.int8]
Ints = NDArray[np.integer[Any]]

IDLE = 0
PERIOD = 6
"""Slots of one microbatch on one rank: forward, input gradient and weight gradient of each of its two stages."""


class Pass(IntEnum):
    """Work of a rank in a slot: one of the four passes of a microbatch over the V and back, or a weight gradient."""

    FORWARD_EARLIER = 1
    """Forward of stage s on rank s."""
    FORWARD_LATER = 2
    """Forward of stage 2p-1-s on rank s."""
    BACKWARD_LATER = 3
    """Backward of stage 2p-1-s on rank s."""
    BACKWARD_EARLIER = 4
    """Backward of stage s on rank s."""
    WEIGHT = 5
    """The second slot of a whole backward, or the weight gradient that is owed longest."""
    WEIGHT_LATER = 6
    WEIGHT_EARLIER = 7


PASSES = (Pass.FORWARD_EARLIER, Pass.FORWARD_LATER, Pass.BACKWARD_LATER, Pass.BACKWARD_EARLIER)
FORWARDS, BACKWARDS = PASSES[:2], PASSES[2:]

_LATER_STAGE = (Pass.FORWARD_LATER, Pass.BACKWARD_LATER, Pass.WEIGHT_LATER)


def is_any(slots: Slots, passes: tuple[Pass, ...]) -> NDArray[np.bool_]:
    """Return where slots run any of these passes, which follow each other; `np.isin` takes ten times as long."""
    return (slots >= passes[0]) & (slots <= passes[-1])


def repeat(anchors: Ints, num_microbatches: int) -> Slots:
    """Draw a building block, [num_ranks, 4] the slots of the passes of microbatch 0, once every `PERIOD` slots."""
    rank = np.arange(len(anchors))[:, None]
    first = PERIOD * np.arange(num_microbatches)
    slots: Slots = np.zeros((len(anchors), int(anchors.max()) + int(first[-1]) + 1), np.int8)
    for kind_of_pass, anchor in zip(PASSES, anchors.T, strict=True):
        slots[rank, anchor[:, None] + first] = kind_of_pass
    return slots


def widen_backwards(slots: Slots) -> Slots:
    """Give every backward a second slot, after its first."""
    wide = np.pad(slots, ((0, 0), (0, 1)))
    wide[:, 1:][is_any(slots, BACKWARDS)] = Pass.WEIGHT
    return wide


def fill_weights(slots: Slots) -> Slots:
    """Put a weight gradient into every idle slot of a rank that owes one, and the rest after the last slot.

    Before:  F  .  .  f  b  .  .  B
    After:   F  .  .  f  b  w  .  B  w
    """
    wide = _with_room(slots)
    wide[pays(wide, BACKWARDS, wide == IDLE)] = Pass.WEIGHT
    return wide


def fill_weights_by_stage(slots: Slots) -> Slots:
    """Put weight gradients as `fill_weights` does, those of the later stage before those of the earlier one."""
    wide = _with_room(slots)
    idle = wide == IDLE
    later = pays(wide, (Pass.BACKWARD_LATER,), idle)
    earlier = pays(wide, (Pass.BACKWARD_EARLIER,), idle & ~later)
    wide[later], wide[earlier] = Pass.WEIGHT_LATER, Pass.WEIGHT_EARLIER
    return wide


def without_weights(slots: Slots) -> Slots:
    """Leave the slots of weight gradients idle."""
    return np.where(is_any(slots, PASSES), slots, IDLE).astype(np.int8)


def owed(slots: Slots, passes: tuple[Pass, ...], free: NDArray[np.bool_]) -> NDArray[np.int32]:
    """[num_ranks, num_slots] weight gradients of these passes owed after each slot, if every `free` slot runs one."""
    balance = np.cumsum(is_any(slots, passes).astype(np.int32) - free, axis=1, dtype=np.int32)
    # A free slot stays idle where nothing is owed: add back each new low of the balance below zero.
    return balance - np.minimum(np.minimum.accumulate(balance, axis=1), 0)


def pays(slots: Slots, passes: tuple[Pass, ...], free: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """[num_ranks, num_slots] the free slots that run a weight gradient of these passes."""
    is_paying = np.zeros(slots.shape, np.bool_)
    is_paying[:, 1:] = free[:, 1:] & (owed(slots, passes, free)[:, :-1] > 0)
    return is_paying


def squeeze(slots: Slots) -> Slots:
    """Run every rank's slots in their order, each as early as its pass on the rank before allows.

    Weight gradients keep their places in the order. Passes that turn round on a rank find theirs earlier in its order.
    """
    rank, slot = np.nonzero(slots)
    pass_of_row = slots[rank, slot]
    predecessor = np.full((len(pass_of_row), 1), NONE, np.int32)
    for kind_of_pass in PASSES:
        # Every rank has each pass once per microbatch, in ascending order: [num_ranks, num_microbatches].
        rows = np.flatnonzero(pass_of_row == kind_of_pass).reshape(len(slots), -1)
        if kind_of_pass in (Pass.FORWARD_EARLIER, Pass.BACKWARD_LATER):  # from the first rank to the last
            predecessor[rows[1:], 0] = rows[:-1]
        else:
            predecessor[rows[:-1], 0] = rows[1:]
    offsets = np.searchsorted(rank, np.arange(len(slots) + 1))
    times = walk(offsets, predecessor, np.zeros(len(pass_of_row), np.bool_), np.ones(len(pass_of_row)))
    start = times.start.astype(np.int64)
    squeezed: Slots = np.zeros((len(slots), int(start.max()) + 1), np.int8)
    squeezed[rank, start] = pass_of_row
    return squeezed


def to_orders(slots: Slots) -> list[NDArray[np.int32]]:
    """Per rank, [num_actions, 3] kind, stage and microbatch of its slots in order.

    Backwards are whole where they have second slots, which are left out.
    """
    num_ranks = len(slots)
    is_second = slots == Pass.WEIGHT
    backward = Kind.BACKWARD if is_second.any() else Kind.BACKWARD_INPUT
    rank, slot = np.nonzero(np.where(is_second, IDLE, slots))
    pass_of_row = slots[rank, slot]
    is_later = np.isin(pass_of_row, _LATER_STAGE)
    order = np.zeros((len(pass_of_row), 3), np.int32)
    order[:, 0] = np.where(pass_of_row > Pass.WEIGHT, Kind.BACKWARD_WEIGHT, Kind.FORWARD)
    order[is_any(pass_of_row, BACKWARDS), 0] = backward
    order[:, 1] = np.where(is_later, 2 * num_ranks - 1 - rank, rank)
    for kind_of_pass in Pass:
        rows = np.flatnonzero(pass_of_row == kind_of_pass)
        order[rows, 2] = np.tile(np.arange(len(rows) // num_ranks), num_ranks)
    return np.split(order, np.searchsorted(rank, np.arange(1, num_ranks)))


def _with_room(slots: Slots) -> Slots:
    """Add idle slots for the weight gradients that are owed at the end."""
    num_owed = int(owed(slots, BACKWARDS, slots == IDLE)[:, -1].max())
    return np.pad(slots, ((0, 0), (0, num_owed)))
