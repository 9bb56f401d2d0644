"""`forward-only`: every microbatch forward, no backward; evaluation and inference.

    4 ranks, 6 microbatches: the order of each rank

        0F0 0F1 0F2 0F3 0F4 0F5
        1F0 1F1 1F2 1F3 1F4 1F5
        2F0 2F1 2F2 2F3 2F4 2F5
        3F0 3F1 3F2 3F3 3F4 3F5

With several stages per rank (stage s on rank s mod p) a rank runs all microbatches of a stage before the next stage.
"""

import numpy as np

from penstock.ir.schedule import Schedule
from penstock.placement import Placement
from penstock.schedules.family import Family, Shape
from penstock.schedules.options import Options


def generate(shape: Shape, options: Options) -> Schedule:
    """Order the forwards of each stage in microbatch order, stage after stage."""
    loop = Placement.loop(shape.num_ranks, shape.num_stages)
    placement = Placement.line(shape.num_ranks) if shape.num_stages == shape.num_ranks else loop
    orders = []
    for stages in placement.stages_of_rank:
        order = np.zeros((len(stages) * shape.num_microbatches, 3), np.int32)
        order[:, 1] = np.repeat(stages, shape.num_microbatches)
        order[:, 2] = np.tile(np.arange(shape.num_microbatches), len(stages))
        orders.append(order)
    return Schedule.from_arrays("forward-only", placement, orders, num_microbatches=shape.num_microbatches)


FAMILY = Family(
    name="forward-only",
    summary="forwards alone",
    source="evaluation and inference",
    placement="line, or loop with several stages per rank",
    restrictions="any number of stages per rank",
    bubble="(p-1)F",
    memory="1",
    advice="evaluation; Pipeline.evaluate derives its own from the training schedule",
    generate=generate,
    stages_per_rank=(1, 0),
)
