"""`sequential`: one microbatch at a time, forward and backward through all ranks; plain gradient accumulation.

4 ranks, 2 microbatches (a column is one unit of time; here a backward takes two)

    0F0 .   .   .   .   .   .   .   .   .   0B0 =   ...
    .   1F0 .   .   .   .   .   .   1B0 =
    .   .   2F0 .   .   .   2B0 =
    .   .   .   3F0 3B0 =
"""

from penstock.schedules.family import Family, Shape, by_rank
from penstock.schedules.options import Options
from penstock.schedules.phases import RankOrder, b, f, phases, repeat


def order(rank: int, shape: Shape, options: Options) -> RankOrder:
    """Run F and B of each microbatch."""
    return phases(repeat(shape.num_microbatches, f(rank), b(rank)))


FAMILY = Family(
    name="sequential",
    summary="one microbatch at a time through all stages",
    source="gradient accumulation",
    placement="line",
    restrictions="one stage per rank",
    bubble="1 - 1/p of the time",
    memory="1",
    advice="as a reference, or when memory allows a single microbatch only",
    generate=by_rank("sequential", order),
)
