"""`breadth-depth`: groups of microbatches in sequence, breadth-first within a group, slices innermost (Fast-LLM).

    2 ranks with 2 stages each, 4 microbatches, breadth 2 and depth 2: the order of each rank

        0F0 0F2 2F0 2F2 2B0 2B2 0B0 0B2 0F1 0F3 2F1 2F3 2B1 2B3 0B1 0B3
        1F0 1F2 3F0 3F2 3B0 3B2 1B0 1B2 1F1 1F3 3F1 3F3 3B1 3B3 1B1 1B3

Of `depth` groups, group d has the microbatches d, d + depth, d + 2 depth, ... It runs as in `looped-bfs`: forward on
the rank's stages one after the other, then backward in reverse. The slices of a microbatch follow each other forward
and come back in reverse, since the backward of a slice needs that of the next. Depth 1 is `looped-bfs` in slices;
breadth 1 on one rank is plain gradient accumulation.

Fast-LLM has depth on one rank only. On several, a group begins on a rank when the one before has left it, so that no
more than one group is in memory and each has a bubble of its own.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, count_of
from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule
from penstock.schedules.family import Family, Shape, loop
from penstock.schedules.options import Number, Options


def generate(shape: Shape, options: Options) -> Schedule:
    """Order group after group: F of stage after stage, then B of the stages in reverse."""
    rows = _rows(shape, _depth(shape.num_microbatches, options))
    orders = []
    for rank in range(shape.num_ranks):
        order = rows.copy()
        order[:, 1] = order[:, 1] * shape.num_ranks + rank
        orders.append(order[order[:, 1] < shape.num_stages])
    return Schedule.from_arrays(
        "breadth-depth",
        loop(shape),
        orders,
        num_microbatches=shape.num_microbatches,
        num_slices=shape.num_slices,
    )


def _rows(shape: Shape, depth: int) -> NDArray[np.int32]:
    """[num_actions, 4] the order of a rank that holds as many stages as any, with stages counted on the rank alone."""
    num_local_stages = -(-shape.num_stages // shape.num_ranks)
    breadth = -(-shape.num_microbatches // depth)
    extents = (depth, 2, num_local_stages, breadth, shape.num_slices)
    group, phase, stage, member, part = np.indices(extents, np.int32).reshape(len(extents), -1)

    is_backward = phase == 1
    kind = np.where(is_backward, Kind.BACKWARD, Kind.FORWARD)
    stage = np.where(is_backward, num_local_stages - 1 - stage, stage)
    part = np.where(is_backward, shape.num_slices - 1 - part, part)
    microbatch = member * depth + group
    rows = np.column_stack([kind, stage, microbatch, part]).astype(np.int32)
    return rows[microbatch < shape.num_microbatches]


def _depth(num_microbatches: int, options: Options) -> int:
    """The number of groups, from whichever of breadth and depth is given."""
    breadth = options.number("breadth", num_microbatches)
    depth = options.number("depth", -(-num_microbatches // breadth))
    if depth > num_microbatches:
        raise ConfigError(
            f"{depth} groups for {count_of(num_microbatches, 'microbatch')} leave some empty; "
            f"give {num_microbatches} or less",
            key="depth",
        )
    fitting = -(-num_microbatches // depth)
    if breadth != fitting and {"breadth", "depth"} <= set(options.given):
        raise ConfigError(
            f"breadth {breadth} x depth {depth} does not make {count_of(num_microbatches, 'microbatch')}; give one of "
            f"the two, or breadth {fitting}",
            key="breadth",
        )
    return depth


FAMILY = Family(
    name="breadth-depth",
    summary="looped-bfs on groups of microbatches in sequence, and in slices",
    source="Fast-LLM; Breadth-First Pipeline Parallelism, arXiv 2211.05953",
    placement="loop",
    restrictions="any number of stages per rank, any total number of stages, any number of microbatches",
    bubble="depth (p-1)(F+B+W) of a stage and slice, if breadth x slices >= p",
    memory="breadth x v x slices, in stages and slices",
    advice="sharded weights and long sequences: depth divides looped-bfs's memory, slices its bubble",
    generate=generate,
    stages_per_rank=(2, 0),
    takes_slices=True,
    options={
        "breadth": Number("m / depth", "microbatches of a group, at most; they run on a stage before its next one"),
        "depth": Number("m / breadth, or 1", "groups, each forward and backward before the next"),
    },
    example=(2, 4),
)
