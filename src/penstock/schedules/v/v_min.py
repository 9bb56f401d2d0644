"""`v-min`: the least memory at which a V stays busy, about a third of 1F1B's (arXiv 2405.15362).

    4 ranks, 4 microbatches: the order of each rank

        0F0 0F1 0F2 7F0 7I0 7W0 7F1 7I1 7W1 0I0 0W0 0F3 7F2 7I2 0I1 7W2 0W1 7F3 7I3 0I2 7W3 0W2 0I3 0W3
        1F0 1F1 6F0 6F1 6I0 6W0 1F2 1I0 6I1 6W1 1W0 6F2 1F3 1I1 6I2 6W2 1W1 6F3 1I2 6I3 6W3 1W2 1I3 1W3
        2F0 2F1 5F0 5F1 5I0 5W0 2F2 2I0 2W0 5I1 5F2 5W1 2I1 2F3 2W1 5I2 5F3 5W2 2I2 2W2 5I3 5W3 2I3 2W3
        3F0 4F0 3F1 4F1 4I0 3I0 4W0 3W0 3F2 4F2 4I1 3I1 4W1 3W1 3F3 4F3 4I2 3I2 4W2 3W2 4I3 3I3 4W3 3W3

Every pass takes one slot of time for each rank, so that nothing lives longer than it must. Its block on 4 ranks:

    rank 0:  F  .  .  .  .  .  .  f  b  w  .  .  .  .  .  B  w
    rank 1:  .  F  .  .  .  .  f  .  .  b  w  .  .  .  B  w
    rank 2:  .  .  F  .  .  f  .  .  .  .  b  w  .  B  w
    rank 3:  .  .  .  F  f  .  .  .  .  .  .  b  B  w  w

Where 3 divides the number of ranks, backwards wait two slots at rank 0, or they would meet the forwards of others.
"""

import numpy as np

from penstock.schedules.family import Family
from penstock.schedules.v.block import split_schedule
from penstock.schedules.v.slots import Ints


def block(num_ranks: int) -> Ints:
    """[num_ranks, 4] the slots of microbatch 0: every pass is one slot later on the next rank of its way."""
    rank = np.arange(num_ranks)
    turn = 2 * num_ranks
    wait = 2 if num_ranks % 3 == 0 else 0
    return np.column_stack([rank, turn - 1 - rank, turn + wait + rank, 2 * turn + wait - 1 - rank])


FAMILY = Family(
    name="v-min",
    summary="a V with about a third of 1f1b's activations",
    source="Pipeline Parallelism with Controllable Memory, arXiv 2405.15362",
    placement="V",
    restrictions="two stages per rank",
    bubble="4p-5 times F = B = W of one stage, 4p-7 where 3 divides p, for p > 1 and from m = p+1 on; none in every "
    "microbatch while W+B >= 2F and W+F >= 2B, B the input gradient",
    memory="at most min(2m, 2 floor((p+1)/3) + 2) of half a rank's layers each",
    advice="where memory is what stops you; v-half idles less, above all where F, B and W differ",
    generate=split_schedule("v-min", block),
    stages_per_rank=(2,),
    example=(4, 4),
)
