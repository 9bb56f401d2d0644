"""Interleaving: the rule by which Megatron-LM orders forwards and backwards of several stages per rank (2104.04473).

A rank visits its stages in turns. The backwards have the same turns as the forwards, with the stages counted from the
last. Two stages, a and b, and five microbatches in groups of three, each group on one stage after the other:

    turn       0  1  2  3  4  5  6  7  8  9
    forward   a0 a1 a2 b0 b1 b2 a3 a4 b3 b4
    backward  b0 b1 b2 a0 a1 a2 b3 b4 a3 a4

The rank warms up with the forwards of the first w turns, then runs forward w+k and backward k one after the other, then
the backwards that are left. Turns may be empty.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.action import Kind
from penstock.ir.hot import Int32s

Ints = NDArray[np.integer[Any]]


def in_turn(turn: Ints, local_stage: Ints, microbatch: Ints, num_warmup: int) -> Int32s:
    """Return [2 num_forwards, 3] kind, local stage and microbatch of a rank, given the turn of each forward."""
    kind = np.repeat([Kind.FORWARD, Kind.BACKWARD], len(turn))
    stage = np.concatenate([local_stage, local_stage.max() - local_stage])
    rows = np.column_stack([kind, stage, np.tile(microbatch, 2)]).astype(np.int32)
    forward, backward = np.where(turn < num_warmup, turn, 2 * turn - num_warmup), 2 * turn + num_warmup + 1
    place = np.concatenate([forward, backward])
    return rows[np.argsort(place, kind="stable")]
