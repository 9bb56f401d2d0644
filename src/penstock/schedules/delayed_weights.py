"""Weight parts that follow late: the rule that `zb-h1` and `zb-h2` share (handcrafted in arXiv 2401.10241, section 2).

With depth d, rank s of p runs in this order

    warm-up   min(m, d(p-s-1)) times F
    turns     F I, and W too once more than ds input parts have run, until no forward is left
    drain     I W, until no input part is left
    rest      the W that are left

Later ranks start later and hold back more weight parts; those fill the time in which they would wait at the end.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule
from penstock.placement import Placement
from penstock.schedules.family import Shape

Order = NDArray[np.int32]


def delayed_weights(name: str, shape: Shape, *, depth: int, joins_backwards: bool = False) -> Schedule:
    """Make the schedule of this depth.

    With `joins_backwards`, all but the held-back and the last backwards of a rank run whole. What was held back then
    waits for the drain, also where there are so few microbatches that no turn reaches beyond it.
    """
    num_microbatches = shape.num_microbatches
    orders = []
    for rank in range(shape.num_ranks):
        num_warmup = min(num_microbatches, depth * (shape.num_ranks - rank - 1))
        num_held = depth * rank
        if shape.is_forward_only:
            order = _forwards(num_microbatches)
        elif joins_backwards:
            order = _join_backwards(_order(num_microbatches, num_warmup, num_held), num_warmup, num_held)
        else:
            order = _order(num_microbatches, num_warmup, min(num_held, num_microbatches - num_warmup))
        order[:, 1] = rank
        orders.append(order)
    return Schedule.from_arrays(name, Placement.line(shape.num_ranks), orders, num_microbatches=num_microbatches)


def _forwards(num_microbatches: int) -> Order:
    order = np.zeros((num_microbatches, 3), np.int32)
    order[:, 2] = np.arange(num_microbatches)
    return order


def _order(num_microbatches: int, num_warmup: int, num_held: int) -> Order:
    """[3 num_microbatches, 3] one rank's order, with the stage left at 0.

    W of a microbatch stands right behind I of the one `num_held` later, or behind the last I. So the position of each
    action can be counted: how many F, I and W run before it.
    """
    microbatch = np.arange(num_microbatches)
    turn = np.maximum(microbatch - num_warmup, 0)
    forward = microbatch + turn + np.maximum(turn - num_held, 0)
    num_forwards = np.minimum(num_warmup + microbatch + 1, num_microbatches)
    input_part = num_forwards + microbatch + np.maximum(microbatch - num_held, 0)
    last_input = np.minimum(microbatch + num_held, num_microbatches - 1)
    weight_part = num_forwards[last_input] + last_input + 1 + microbatch

    order = np.zeros((3 * num_microbatches, 3), np.int32)
    positions = {Kind.FORWARD: forward, Kind.BACKWARD_INPUT: input_part, Kind.BACKWARD_WEIGHT: weight_part}
    for kind, position in positions.items():
        order[position, 0] = kind
        order[position, 2] = microbatch
    return order


def _join_backwards(order: Order, num_warmup: int, num_held: int) -> Order:
    """Let an input part take its own W instead of an older one, while there are forwards to come."""
    kind, microbatch = order[:, 0], order[:, 2]
    num_microbatches = int(microbatch.max()) + 1
    more_to_come = (num_warmup + microbatch + 1 < num_microbatches) | (num_held == 0)
    joined = np.flatnonzero((kind == Kind.BACKWARD_INPUT) & (microbatch >= num_held) & more_to_come)

    kind[joined] = Kind.BACKWARD
    order = np.delete(order, joined + 1, axis=0)  # the W behind each; those that stay get new owners
    split = order[order[:, 0] == Kind.BACKWARD_INPUT, 2]
    order[order[:, 0] == Kind.BACKWARD_WEIGHT, 2] = split
    return order
