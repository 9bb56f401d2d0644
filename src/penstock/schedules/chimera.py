"""`chimera`: two 1F1B pipelines in opposite directions over two copies of the model (Chimera, arXiv 2107.06925).

    4 ranks, 6 microbatches, 0-2 on stages 0-3 and 3-5 on stages 4-7: the order of each rank

        0F0 0F1 7F3 0F2 7B3 7F4 7B4 7F5 0B0 7B5 0B1 0B2
        1F0 6F3 1F1 6F4 1F2 6F5 6B3 1B0 6B4 1B1 6B5 1B2
        5F3 2F0 5F4 2F1 5F5 2F2 2B0 5B3 2B1 5B4 2B2 5B5
        4F3 4F4 3F0 4F5 3B0 3F1 3B1 3F2 4B3 3B2 4B4 4B5

Every rank alternates forwards and backwards of both directions. On a clock of one unit per action, microbatch k of its
direction is at the stage at place q of its route

    forward     at 2q + 4k
    backward    at 2p + 1 + 2(p-1-q) + 4k, and 2 later on the two middle ranks

For p microbatches this merges two plain 1F1B pipelines, as in the paper; for more, the same rhythm goes on. The middle
ranks bound the time, as what they run starts last: with their backwards later they have a forward more at hand and do
not wait. Two ranks need none of that, so there backwards are at 2p - 1 + 2(p-1-q) + 4k.
"""

import numpy as np

from penstock.ir.schedule import Schedule
from penstock.placement import Placement
from penstock.schedules.by_time import Times, orders_by_time
from penstock.schedules.family import Family, Shape, require_even
from penstock.schedules.options import Options


def generate(shape: Shape, options: Options) -> Schedule:
    """Return Chimera's schedule: two copies of the model in opposite directions, half of the microbatches on each.

    A route is the way through one copy: route 0 from rank 0 to the last rank, route 1 back. Each forward and backward
    gets a time, in units of half a forward, at which it would run without messages; each rank runs its actions in the
    order of these times.

    Raises:
        ConfigError: the number of ranks or of microbatches is odd.
    """
    num_ranks, num_microbatches = shape.num_ranks, shape.num_microbatches
    require_even("chimera", shape, instead="hanayo with one copy of the model on any number")
    num_per_route = num_microbatches // 2
    rank = np.arange(num_ranks)
    position = np.stack([rank, num_ranks - 1 - rank], axis=1)[:, :, None]  # [rank, route, 1] in the route
    index_in_route = np.arange(num_per_route)

    forward: Times = 2 * position + 4 * index_in_route
    backward: Times = 2 * num_ranks - 1 + 2 * (num_ranks - 1 - position) + 4 * index_in_route
    if num_ranks > 2:
        backward += 2
        backward[num_ranks // 2 - 1 : num_ranks // 2 + 1] += 2
    route = np.arange(2)[:, None]
    orders = orders_by_time(position + num_ranks * route, index_in_route + num_per_route * route, forward, backward)
    return Schedule.from_arrays(
        "chimera",
        Placement.bidirectional(num_ranks),
        orders,
        num_microbatches=num_microbatches,
        route_of_microbatch=np.repeat(np.arange(2, dtype=np.int8), num_per_route),
    )


FAMILY = Family(
    name="chimera",
    summary="two 1F1B pipelines in opposite directions over two copies of the model",
    source="Chimera, arXiv 2107.06925",
    placement="bidirectional: stage k and the second copy of stage p-1-k on rank k",
    restrictions="an even number of ranks, an even number of microbatches; twice the weights",
    bubble="(p-2)(B+W) for p microbatches; less for more: (p-3)(B+W)+F if F <= B+W <= 2F; none on 2 ranks",
    memory="p/2+1 to p for p microbatches; at most p+1, p+2 on the two middle ranks, 2 on 2 ranks",
    advice="half the bubble of 1f1b and even memory, where there is room for the weights twice",
    generate=generate,
    stages_per_rank=(2,),
)
