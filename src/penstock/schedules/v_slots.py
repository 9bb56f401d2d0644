"""Tables of slots: what each rank of a V runs in each unit of time, while a schedule is being made from a block.

A table is an int8 array [num_ranks, num_slots] of `Leg`s, 0 where a rank idles. Microbatches are not written down: on
every rank each leg takes them in ascending order. Two ranks, one microbatch, `WEIGHT` written as w:

    rank 0:  F  .  .  f  b  w  .  B  w        F f  forward out, forward home
    rank 1:  .  F  f  .  .  b  B  w  w        b B  backward out, backward home
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
"""Slots of one microbatch on one rank: forward, input part and weight part of each of its two stages."""


class Leg(IntEnum):
    """What a rank does in a slot: one of the four legs of a microbatch's way over the V and back, or a weight part."""

    FORWARD_OUT = 1
    """Forward of stage s on rank s."""
    FORWARD_HOME = 2
    """Forward of stage 2p-1-s on rank s."""
    BACKWARD_OUT = 3
    """Backward of stage 2p-1-s on rank s."""
    BACKWARD_HOME = 4
    """Backward of stage s on rank s."""
    WEIGHT = 5
    """The second slot of a whole backward, or the weight part that is owed longest."""
    WEIGHT_OUT = 6
    WEIGHT_HOME = 7


LEGS = (Leg.FORWARD_OUT, Leg.FORWARD_HOME, Leg.BACKWARD_OUT, Leg.BACKWARD_HOME)
FORWARDS, BACKWARDS = LEGS[:2], LEGS[2:]

_LATER_STAGE = (Leg.FORWARD_HOME, Leg.BACKWARD_OUT, Leg.WEIGHT_OUT)
_KIND = {
    Leg.FORWARD_OUT: Kind.FORWARD,
    Leg.FORWARD_HOME: Kind.FORWARD,
    Leg.BACKWARD_OUT: Kind.BACKWARD_INPUT,
    Leg.BACKWARD_HOME: Kind.BACKWARD_INPUT,
    Leg.WEIGHT_OUT: Kind.BACKWARD_WEIGHT,
    Leg.WEIGHT_HOME: Kind.BACKWARD_WEIGHT,
}


def repeat(anchors: Ints, num_microbatches: int) -> Slots:
    """Draw a building block, [num_ranks, 4] the slots of the legs of microbatch 0, once every `PERIOD` slots."""
    rank = np.arange(len(anchors))[:, None]
    first = PERIOD * np.arange(num_microbatches)
    slots: Slots = np.zeros((len(anchors), int(anchors.max()) + int(first[-1]) + 1), np.int8)
    for leg, anchor in zip(LEGS, anchors.T, strict=True):
        slots[rank, anchor[:, None] + first] = leg
    return slots


def widen_backwards(slots: Slots) -> Slots:
    """Give every backward a second slot, behind its first."""
    wide = np.pad(slots, ((0, 0), (0, 1)))
    wide[:, 1:][np.isin(slots, BACKWARDS)] = Leg.WEIGHT
    return wide


def fill_weights(slots: Slots) -> Slots:
    """Put a weight part into every idle slot of a rank that owes one, and the rest behind the last slot.

    Before:  F  .  .  f  b  .  .  B
    After:   F  .  .  f  b  w  .  B  w
    """
    wide = _with_room(slots)
    wide[pays(wide, BACKWARDS, wide == IDLE)] = Leg.WEIGHT
    return wide


def fill_weights_by_leg(slots: Slots) -> Slots:
    """Put weight parts as `fill_weights` does, those of the leg out before those of the leg home."""
    wide = _with_room(slots)
    idle = wide == IDLE
    out = pays(wide, (Leg.BACKWARD_OUT,), idle)
    home = pays(wide, (Leg.BACKWARD_HOME,), idle & ~out)
    wide[out], wide[home] = Leg.WEIGHT_OUT, Leg.WEIGHT_HOME
    return wide


def without_weights(slots: Slots) -> Slots:
    """Leave the slots of weight parts idle."""
    return np.where(np.isin(slots, LEGS), slots, IDLE).astype(np.int8)


def owed(slots: Slots, legs: tuple[Leg, ...], free: NDArray[np.bool_]) -> NDArray[np.int32]:
    """[num_ranks, num_slots] weight parts of these legs that wait after each slot, if every `free` slot runs one."""
    balance = np.cumsum(np.isin(slots, legs).astype(np.int32) - free, axis=1, dtype=np.int32)
    # Whatever fell below zero are free slots that found nothing to run.
    return balance - np.minimum(np.minimum.accumulate(balance, axis=1), 0)


def pays(slots: Slots, legs: tuple[Leg, ...], free: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """[num_ranks, num_slots] the free slots that run a weight part of these legs."""
    is_paying = np.zeros(slots.shape, np.bool_)
    is_paying[:, 1:] = free[:, 1:] & (owed(slots, legs, free)[:, :-1] > 0)
    return is_paying


def squeeze(slots: Slots) -> Slots:
    """Run every rank's slots in their order, each as early as its leg on the rank before allows.

    Weight parts keep their places in the order. Legs that turn round on a rank find theirs earlier in its order.
    """
    rank, slot = np.nonzero(slots)
    leg_of_row = slots[rank, slot]
    before = np.full((len(leg_of_row), 1), NONE, np.int32)
    for leg in LEGS:
        rows = np.flatnonzero(leg_of_row == leg).reshape(len(slots), -1)
        if _goes_out(leg):
            before[rows[1:], 0] = rows[:-1]
        else:
            before[rows[:-1], 0] = rows[1:]
    offsets = np.searchsorted(rank, np.arange(len(slots) + 1))
    times = walk(offsets, before, np.zeros(len(leg_of_row), np.bool_), np.ones(len(leg_of_row)))
    start = times.start.astype(np.int64)
    squeezed: Slots = np.zeros((len(slots), int(start.max()) + 1), np.int8)
    squeezed[rank, start] = leg_of_row
    return squeezed


def to_orders(slots: Slots, *, is_split: bool) -> list[NDArray[np.int32]]:
    """Per rank, [num_actions, 3] kind, stage and microbatch of its slots in order; `WEIGHT`s are left out."""
    num_ranks = len(slots)
    rank, slot = np.nonzero(np.where(slots == Leg.WEIGHT, IDLE, slots))
    leg_of_row = slots[rank, slot]
    columns = np.zeros((len(leg_of_row), 3), np.int32)
    for leg, kind in _KIND.items():
        rows = np.flatnonzero(leg_of_row == leg)
        columns[rows, 0] = kind if is_split or kind is Kind.FORWARD else Kind.BACKWARD
        columns[rows, 1] = 2 * num_ranks - 1 - rank[rows] if leg in _LATER_STAGE else rank[rows]
        columns[rows, 2] = np.tile(np.arange(len(rows) // num_ranks), num_ranks)
    return np.split(columns, np.searchsorted(rank, np.arange(1, num_ranks)))


def _goes_out(leg: Leg) -> bool:
    """Whether a leg goes from the first rank to the last."""
    return leg in (Leg.FORWARD_OUT, Leg.BACKWARD_OUT)


def _with_room(slots: Slots) -> Slots:
    """Add idle slots for the weight parts that are owed at the end."""
    num_owed = int(owed(slots, BACKWARDS, slots == IDLE)[:, -1].max())
    return np.pad(slots, ((0, 0), (0, num_owed)))
