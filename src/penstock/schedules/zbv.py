"""`zbv`: two stages per rank in a V, backwards split, in the memory of 1F1B (arXiv 2401.10241, section 6).

3 ranks, 5 microbatches: the order of each rank

0F0 0F1 0F2 0F3 0F4 5F0 5I0 5W0 5F1 5I1 5W1 5F2 5I2 5W2 0I0 0W0 5F3 5I3 5W3 0I1 0W1 5F4 5I4 5W4 0I2 0W2 0I3 0W3 0I4 0W4
1F0 1F1 1F2 4F0 1F3 4F1 4I0 4W0 4F2 4I1 4W1 1F4 1I0 1W0 4F3 4I2 4W2 1I1 1W1 4F4 4I3 4W3 1I2 4I4 1I3 1W2 1I4 1W3 4W4 1W4
2F0 3F0 2F1 3F1 2F2 3F2 3I0 3W0 2F3 2I0 2W0 3F3 3I1 3W1 2F4 2I1 2W1 3F4 3I2 3W2 2I2 3I3 2I3 3I4 2I4 2W2 3W3 3W4 2W3 2W4

A microbatch goes down the ranks through stages 0..p-1 and up again through p..2p-1, so that rank r holds stage r on the
way down and stage 2p-1-r on the way up. Each rank runs, with d for its stage on the way down and u for the other:

    2(p-r)-1 times  dF
    r times         uF dF
    p-r times       uF uI uW
    m-p times       dF dI dW uF uI uW       without dF once it has run out
    r times         dI uI
    p-r times       dI dW                   dW of the oldest microbatch
    then            the uW and the dW that are left

The counts need m >= 2p-1. Fewer microbatches run in the order of 2p-1 of which only the first m exist. This is the
fixed order of torch.distributed.pipelining; the paper searches for an order that suits given costs.
"""

from penstock.placement import Placement
from penstock.schedules.family import Family, Shape, by_rank
from penstock.schedules.options import Options
from penstock.schedules.phases import RankOrder, f, i, phases, repeat, w


def order(rank: int, shape: Shape, options: Options) -> RankOrder:
    """Run the phases above, and drop the microbatches that do not exist."""
    ranks = shape.num_ranks
    down, up, num_later_ranks = rank, 2 * ranks - 1 - rank, ranks - rank
    turns = max(shape.num_microbatches, 2 * ranks - 1) - ranks
    return phases(
        repeat(2 * num_later_ranks - 1, f(down)),
        repeat(rank, f(up), f(down)),
        repeat(num_later_ranks, f(up), i(up), w(up)),
        repeat(turns, f(down), i(down), w(down), f(up), i(up), w(up)),
        repeat(rank, i(down), i(up)),
        repeat(num_later_ranks, i(down), w(down)),
        repeat(rank, w(up)),
        repeat(rank, w(down)),
        microbatches=shape.num_microbatches,
    )


FAMILY = Family(
    name="zbv",
    summary="two stages per rank in a V, with delayed weight gradients",
    source="Zero Bubble Pipeline Parallelism, arXiv 2401.10241; the order of torch.distributed.pipelining",
    placement="V",
    restrictions="two stages per rank; without a bubble from 2p-1 microbatches on",
    bubble="2(p-1)(B-W) by span and (p-1) max(B, 2(B-W)) by makespan from m = 2p-1 on, with W <= F <= B of one stage, "
    "B the input gradient",
    memory="min(2p, m + min(m, s+1)) of half a rank's layers each",
    advice="about half the bubble of zb-h2 in the memory of 1f1b, for twice the messages; rank 0 holds both ends",
    generate=by_rank("zbv", order, lambda shape: Placement.vee(shape.num_ranks)),
    stages_per_rank=(2,),
    example=(3, 5),
)
