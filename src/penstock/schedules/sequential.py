"""`sequential`: one microbatch at a time, forward and backward through all ranks; plain gradient accumulation.

4 ranks, 2 microbatches (a column is one unit of time; here a backward takes two)

    0F0 .   .   .   .   .   .   .   .   .   0B0 =   ...
    .   1F0 .   .   .   .   .   .   1B0 =
    .   .   2F0 .   .   .   2B0 =
    .   .   .   3F0 3B0 =
"""

import numpy as np

from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule
from penstock.placement import Placement
from penstock.schedules.family import Family, Shape
from penstock.schedules.options import Options


def generate(shape: Shape, options: Options) -> Schedule:
    """Order F then B of each microbatch on every rank."""
    num_microbatches = shape.num_microbatches
    kinds = [Kind.FORWARD] if shape.is_forward_only else [Kind.FORWARD, Kind.BACKWARD]
    kind = np.tile(kinds, num_microbatches)
    microbatch = np.repeat(np.arange(num_microbatches), len(kinds))
    orders = [
        np.column_stack([kind, np.full_like(kind, rank), microbatch]).astype(np.int32)
        for rank in range(shape.num_ranks)
    ]
    return Schedule.from_arrays(
        "sequential", Placement.line(shape.num_ranks), orders, num_microbatches=num_microbatches
    )


FAMILY = Family(
    name="sequential",
    summary="one microbatch at a time through all stages",
    source="gradient accumulation",
    placement="line",
    restrictions="one stage per rank",
    bubble="1 - 1/p of the time",
    memory="1",
    advice="as a reference, or when memory allows a single microbatch only",
    generate=generate,
)
