"""`zb-h2`: backwards split and no bubble within a rank, for twice the memory (arXiv 2401.10241, section 2.2).

    4 ranks, 8 microbatches: the order of each rank

        0F0 0F1 0F2 0F3 0F4 0F5 0F6 0I0 0W0 0F7 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5 0I6 0W6 0I7 0W7
        1F0 1F1 1F2 1F3 1F4 1I0 1F5 1I1 1F6 1I2 1W0 1F7 1I3 1W1 1I4 1W2 1I5 1W3 1I6 1W4 1I7 1W5 1W6 1W7
        2F0 2F1 2F2 2I0 2F3 2I1 2F4 2I2 2F5 2I3 2F6 2I4 2W0 2F7 2I5 2W1 2I6 2W2 2I7 2W3 2W4 2W5 2W6 2W7
        3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3F4 3I4 3F5 3I5 3F6 3I6 3W0 3F7 3I7 3W1 3W2 3W3 3W4 3W5 3W6 3W7

Rank s warms up with 2(p-s-1) forwards and holds back 2s weight gradients, twice as many as in `zb-h1`. The ranks end
one after the other, as they began. Where W is as long as I, the makespan is thus that of `zb-h1`, unless the optimizer
steps rank by rank; where W is shorter, it is shorter by (p-1) times the smaller of W and I-W.
"""

from penstock.schedules.family import Family, Shape, by_rank
from penstock.schedules.options import Options
from penstock.schedules.phases import RankOrder
from penstock.schedules.zb_h1 import delayed


def order(rank: int, shape: Shape, options: Options) -> RankOrder:
    """Run twice as many warm-up forwards as 1F1B, then F, I and a late W in turn, then what is left."""
    warmup = min(shape.num_microbatches, 2 * (shape.num_ranks - rank - 1))
    return delayed(rank, shape.num_microbatches, warmup, 2 * rank)


FAMILY = Family(
    name="zb-h2",
    summary="no bubble within a rank, for twice the activations",
    source="Zero Bubble Pipeline Parallelism, arXiv 2401.10241",
    placement="line",
    restrictions="one stage per rank; without a bubble from 2p-1 microbatches on",
    bubble="(p-1)(F+B-2W) by span and (p-1) max(F, F+B-2W) by makespan from m = 2p-1 on, with B the input gradient and "
    "W <= F, B",
    memory="min(m, 2p-1), of which 2s only as tensors saved for W",
    advice="memory to spare, and W shorter than the input gradient; otherwise zb-h1 ends as early",
    generate=by_rank("zb-h2", order),
    example=(4, 8),
)
