"""`seq1f1b`: 1F1B over slices of the sequence instead of whole microbatches (Seq1F1B, arXiv 2406.03488).

4 ranks, 3 microbatches, 2 slices: the order of each rank, `.1` for slice 1

    0F0   0F0.1 0F1   0F1.1 0F2   0B0.1 0F2.1 0B0   0B1.1 0B1   0B2.1 0B2
    1F0   1F0.1 1F1   1F1.1 1B0.1 1F2   1B0   1F2.1 1B1.1 1B1   1B2.1 1B2
    2F0   2F0.1 2F1   2B0.1 2F1.1 2B0   2F2   2B1.1 2F2.1 2B1   2B2.1 2B2
    3F0   3F0.1 3B0.1 3F1   3B0   3F1.1 3B1.1 3F2   3B1   3F2.1 3B2.1 3B2

Slices go forward from the first to the last, since attention looks back, and backward from the last to the first. With
k slices, rank s warms up with min(mk, p-s-2+k) of them, so that the last rank has forwarded a whole microbatch before
its first backward. One slice is `1f1b`.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule
from penstock.placement import Placement
from penstock.schedules.family import Family, Shape
from penstock.schedules.options import Options

Order = NDArray[np.int32]


def generate(shape: Shape, options: Options) -> Schedule:
    """Order warm-up forwards, then F and B of slices in turn, then the backwards that are left."""
    num_slices = shape.num_slices
    forwards, backwards = _passes(shape)
    orders = []
    for rank in range(shape.num_ranks):
        num_warmup = min(len(forwards), shape.num_ranks - rank - 2 + num_slices)
        order = forwards.copy() if shape.is_forward_only else _turns(forwards, backwards, num_warmup)
        order[:, 1] = rank
        orders.append(order)
    return Schedule.from_arrays(
        "seq1f1b",
        Placement.line(shape.num_ranks),
        orders,
        num_microbatches=shape.num_microbatches,
        num_slices=num_slices,
    )


def _passes(shape: Shape) -> tuple[Order, Order]:
    """[num_microbatches x num_slices, 4] all forwards and all backwards in their orders, with the stage left at 0."""
    microbatch, part = np.divmod(np.arange(shape.num_microbatches * shape.num_slices), shape.num_slices)
    stage = np.zeros_like(part)
    forwards = np.column_stack([np.full_like(part, Kind.FORWARD), stage, microbatch, part])
    backwards = np.column_stack([np.full_like(part, Kind.BACKWARD), stage, microbatch, shape.num_slices - 1 - part])
    return forwards.astype(np.int32), backwards.astype(np.int32)


def _turns(forwards: Order, backwards: Order, num_warmup: int) -> Order:
    num_turns = len(forwards) - num_warmup
    turns = np.stack([forwards[num_warmup:], backwards[:num_turns]], axis=1).reshape(-1, 4)
    return np.concatenate([forwards[:num_warmup], turns, backwards[num_turns:]])


FAMILY = Family(
    name="seq1f1b",
    summary="1f1b over slices of the sequence",
    source="Seq1F1B, arXiv 2406.03488",
    placement="line",
    restrictions="one stage per rank; attention must be causal",
    bubble="(p-1)(F+B+W)/k with k slices",
    memory="min(mk, p-s-1+k) slices, each 1/k of a microbatch",
    advice="long sequences: both bubble and activations shrink with the number of slices",
    generate=generate,
    takes_slices=True,
)
