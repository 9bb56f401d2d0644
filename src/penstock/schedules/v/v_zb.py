"""`v-zb`: a V without a bubble where F, I and W cost the same, in the memory of 1F1B (arXiv 2405.15362).

    4 ranks, 4 microbatches: the order of each rank

        0F0 0F1 0F2 0F3 7F0 7I0 7W0 7F1 7I1 7W1 7F2 7I2 7W2 7F3 7I3 0I0 7W3 0W0 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1F1 1F2 1F3 6F0 6F1 6I0 6W0 6F2 6I1 6W1 6F3 6I2 1I0 6W2 1W0 6I3 1I1 6W3 1W1 1I2 1W2 1I3 1W3
        2F0 2F1 2F2 5F0 2F3 5F1 5F2 5I0 5W0 5F3 5I1 2I0 5W1 2W0 5I2 2I1 5W2 2W1 5I3 2I2 5W3 2W2 2I3 2W3
        3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 4I0 3I0 4W0 3W0 4I1 3I1 4W1 3W1 4I2 3I2 4W2 3W2 4I3 3I3 4W3 3W3

From the first rank to the last, passes take four slots of time for each rank, back two. Its block on 3 ranks:

    rank 0:  F  .  .  .  .  .  .  .  .  .  .  .  .  f  b  w  .  .  .  .  .  .  .  .  .  .  .  B  w
    rank 1:  .  .  .  .  F  .  .  .  .  .  .  f  .  .  .  .  .  .  b  w  .  .  .  .  .  B  w
    rank 2:  .  .  .  .  .  .  .  .  F  f  .  .  .  .  .  .  .  .  .  .  .  .  b  B  w  w

Modulo 6, four slots later are two slots earlier: from each rank to the next all passes shift alike, and every rank
comes to repeat F f b B w w. On each rank the two activations of a microbatch live 12p-2 slots together, which makes 2p
alive at once: those of p microbatches, as on rank 0 of 1F1B.
"""

import numpy as np

from penstock.schedules.family import Family
from penstock.schedules.v.block import split_schedule
from penstock.schedules.v.slots import Ints


def block(num_ranks: int) -> Ints:
    """[num_ranks, 4] the slots of microbatch 0: F and b go down the ranks in four slots each, f and B up in two."""
    rank = np.arange(num_ranks)
    turn = 6 * num_ranks - 4
    return np.column_stack([4 * rank, turn - 1 - 2 * rank, turn + 4 * rank, 2 * turn - 1 - 2 * rank])


FAMILY = Family(
    name="v-zb",
    summary="a V without a bubble, with 1f1b's activations",
    source="Pipeline Parallelism with Controllable Memory, arXiv 2405.15362",
    placement="V",
    restrictions="two stages per rank; without a bubble from 2p microbatches on",
    bubble="0 by span and p-1 by makespan, in times F = B = W of one stage, from 2p microbatches on; with unequal ones "
    "more, but none in every microbatch",
    memory="at most 2 min(m, p) of half a rank's layers each, on every rank",
    advice="to compare v-min and v-half with what full memory gives; zbv, in the same memory, idles no longer",
    generate=split_schedule("v-zb", block),
    stages_per_rank=(2,),
    example=(4, 4),
)
