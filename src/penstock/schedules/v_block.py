"""V schedules from a building block: repeat it, reorder it, squeeze it (arXiv 2405.15362).

Stages r and 2p-1-r lie on rank r. A block says in which slots of time microbatch 0 takes its four legs on each rank:
forward out, forward home, backward out, backward home. Each further microbatch follows 6 slots later, since 6 are what
it costs a rank. A rank's four slots differ modulo 6, so that microbatches never meet, and leave two of six slots for
weight parts. V-Min on 4 ranks, three microbatches, before anything is moved:

    rank 0:  F  .  .  .  .  .  F  f  b  w  .  .  F  f  b  B  w  w  .  f  b  B  w  w  .  .  .  B  w
    rank 1:  .  F  .  .  .  .  f  F  .  b  w  .  f  F  B  b  w  w  f  .  B  b  w  w  .  .  B  w
    rank 2:  .  .  F  .  .  f  .  .  F  .  b  f  w  B  F  w  b  f  w  B  w  .  b  w  .  B  w
    rank 3:  .  .  .  F  f  .  .  .  .  F  f  b  B  w  w  F  f  b  B  w  w  .  .  b  B  w  w

The block decides the memory. An activation lives from its forward to its weight part, so that a rank holds, in the mean
over 6 slots, a sixth of the lifetimes that a microbatch's two activations have on it. The most that any rank of the
repeated block holds is not exceeded by a later step: reordering counts, squeezing keeps each rank's order, and weight
parts run as soon as a slot is idle. Durations have no part in this: the order depends on the block and on the number of
microbatches alone.
"""

from penstock.ir.schedule import Schedule
from penstock.placement import Placement
from penstock.schedules.family import Shape
from penstock.schedules.v_reorder import move_earlier, move_end_earlier, move_whole_earlier
from penstock.schedules.v_slots import (
    Ints,
    Slots,
    fill_weights,
    fill_weights_by_leg,
    repeat,
    squeeze,
    to_orders,
    widen_backwards,
    without_weights,
)


def split_schedule(name: str, anchors: Ints, shape: Shape) -> Schedule:
    """Make the schedule of a block, [num_ranks, 4] the slots of its legs, with backwards in two parts."""
    repeated = fill_weights(repeat(anchors, shape.num_microbatches))
    started = without_weights(squeeze(move_earlier(repeated)))
    # Weight parts fill idle slots anew, now that there are others; then both stages have theirs in order.
    ended = without_weights(squeeze(fill_weights(move_end_earlier(started))))
    return _schedule(name, fill_weights_by_leg(ended), shape, is_split=True)


def whole_schedule(name: str, anchors: Ints, shape: Shape) -> Schedule:
    """Make the schedule of a block whose backwards are whole and take two slots, the first of which is in `anchors`."""
    repeated = widen_backwards(repeat(anchors, shape.num_microbatches))
    return _schedule(name, move_whole_earlier(repeated), shape, is_split=False)


def _schedule(name: str, slots: Slots, shape: Shape, *, is_split: bool) -> Schedule:
    orders = to_orders(slots, is_split=is_split)
    placement = Placement.vee(shape.num_ranks)
    return Schedule.from_arrays(name, placement, orders, num_microbatches=shape.num_microbatches)
