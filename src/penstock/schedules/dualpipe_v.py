"""`dualpipe-v`: DualPipe cut in half and folded: one copy of the model in a V (DualPipe's repository, "Cut-in-half").

    2 ranks, 4 microbatches: the order of each rank

        0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1) (3F2;0B0) 3B2 (3F3;0B1) 3B3 0I2 0W2 0I3 0W3
        1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0) (1F3;2B1) (2F3;1B1) 2B2 1B2 2I3 1I3 2W3 1W3

The rank of the last stage is that of the first, so a microbatch goes down the ranks and up again and meets its
successors, whose forwards overlap with its backwards. Each rank runs the steps of `eight_steps`, with the last rank
at the fold.
"""

from penstock.placement import Placement
from penstock.schedules.eight_steps import OVERLAP, eight_steps, require_two_per_rank
from penstock.schedules.family import Family, Shape, by_rank
from penstock.schedules.options import Options
from penstock.schedules.phases import RankOrder


def order(rank: int, shape: Shape, options: Options) -> RankOrder:
    """Run the eight steps between the stage on the way down and the stage on the way up."""
    ranks = shape.num_ranks
    require_two_per_rank("dualpipe-v", shape.num_microbatches, ranks, instead="hanayo")
    sides = (rank, 0), (2 * ranks - 1 - rank, 0)
    return eight_steps(sides, ranks - 1 - rank, rank + 1, shape.num_microbatches, options)


FAMILY = Family(
    name="dualpipe-v",
    summary="DualPipe on one copy of the model, folded into a V",
    source="DualPipeV, deepseek-ai/DualPipe, after the cut-in-half procedure of Sea AI Lab",
    placement="V",
    restrictions="two stages per rank, at least 2p microbatches",
    bubble="(p-1)(P+B-2W) for F=B=W of a stage, where an overlapped pair takes P",
    memory="2p+1 stages, each half of what a rank holds",
    advice="as dualpipe, with one copy of the weights and any number of ranks",
    generate=by_rank("dualpipe-v", order, lambda shape: Placement.vee(shape.num_ranks)),
    stages_per_rank=(2,),
    options={"overlap": OVERLAP},
    example=(4, 8),
)
