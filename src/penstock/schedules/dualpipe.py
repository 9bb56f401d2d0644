"""`dualpipe`: both directions at once, forward of one overlapped with backward of the other (DeepSeek-V3, 2412.19437).

    4 ranks, 8 microbatches, 0-3 on stages 0-3 and 4-7 on stages 4-7: the order of each rank

        0F0 0F1 0F2 7F4 7I4 7W4 7F5 (0F3;7B5) (7F6;0B0) 7B6 (7F7;0B1) 7B7 0I2 0W2 0I3 0W3
        1F0 6F4 1F1 6F5 1F2 6B4 (6F6;1B0) (1F3;6B5) (6F7;1B1) 6B6 1B2 6I7 1I3 6W7 1W3
        5F4 2F0 5F5 2F1 5F6 2B0 (2F2;5B4) (5F7;2B1) (2F3;5B5) 2B2 5B6 2I3 5I7 2W3 5W7
        4F4 4F5 4F6 3F0 3I0 3W0 3F1 (4F7;3B1) (3F2;4B4) 3B2 (3F3;4B5) 3B3 4I6 4W6 4I7 4W7

Two copies of the model are spread over the ranks in opposite directions. Half of the microbatches enters at either end.
Each rank runs the steps of `eight_steps`, with the middle of the pipeline as the fold.
"""

from penstock.placement import Placement
from penstock.schedules.eight_steps import OVERLAP, eight_steps, require_two_per_rank
from penstock.schedules.family import Family, Shape, by_rank, require_even
from penstock.schedules.options import Options
from penstock.schedules.phases import RankOrder


def order(rank: int, shape: Shape, options: Options) -> RankOrder:
    """Run the eight steps between the two directions; the second half of the ranks mirrors the first."""
    ranks, half = shape.num_ranks, shape.num_microbatches // 2
    require_even("dualpipe", shape, instead="dualpipe-v on any number")
    require_two_per_rank("dualpipe", shape.num_microbatches, ranks, instead="chimera")
    first_copy, second_copy = (rank, 0), (2 * ranks - 1 - rank, half)
    sides = (first_copy, second_copy) if rank < ranks // 2 else (second_copy, first_copy)
    from_end = min(rank, ranks - 1 - rank)
    return eight_steps(sides, ranks // 2 - 1 - from_end, from_end + 1, half, options)


FAMILY = Family(
    name="dualpipe",
    summary="both directions at once, the forward of one overlapped with the backward of the other",
    source="DualPipe, DeepSeek-V3, arXiv 2412.19437",
    placement="bidirectional: stage k and the second copy of stage p-1-k on rank k",
    restrictions="an even number of ranks, an even number of microbatches of 2p or more; twice the weights",
    bubble="(p/2-1)(P+B-2W) for F=B=W, where an overlapped pair takes P",
    memory="p+1",
    advice="expert parallelism: what one direction waits for on the network hides behind the other's computation",
    generate=by_rank("dualpipe", order, lambda shape: Placement.bidirectional(shape.num_ranks)),
    stages_per_rank=(2,),
    options={"overlap": OVERLAP},
    example=(4, 8),
)
