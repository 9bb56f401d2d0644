"""`v-half`: a V that stays busy in half of 1F1B's memory (arXiv 2405.15362).

    4 ranks, 4 microbatches: the order of each rank

        0F0 0F1 0F2 0F3 7F0 7I0 7W0 7F1 7I1 7W1 7F2 0I0 7I2 7W2 7F3 0W0 0I1 7I3 7W3 0W1 0I2 0W2 0I3 0W3
        1F0 1F1 1F2 1F3 6F0 6F1 6I0 6W0 6F2 6I1 6W1 1I0 1W0 6F3 6I2 6W2 1I1 1W1 6I3 6W3 1I2 1W2 1I3 1W3
        2F0 2F1 2F2 5F0 5F1 5F2 5I0 5W0 2F3 5I1 2I0 5W1 2W0 5F3 2I1 5I2 5W2 2W1 2I2 5I3 5W3 2W2 2I3 2W3
        3F0 4F0 3F1 4F1 3F2 4F2 4I0 4W0 3I0 3W0 3F3 4F3 4I1 4W1 3I1 3W1 4I2 4W2 3I2 3W2 4I3 4W3 3I3 3W3

From the first rank to the last, passes take two slots of time for each rank, back one. Its block on 4 ranks:

    rank 0:  F  .  .  .  .  .  .  .  .  .  f  .  .  .  b  w  .  .  .  .  .  .  .  .  .  B  w
    rank 1:  .  .  F  .  .  .  .  .  .  f  .  .  .  .  .  .  b  w  .  .  .  .  .  .  B  w
    rank 2:  .  .  .  .  F  .  .  .  f  .  .  .  .  .  .  .  .  .  b  w  .  .  .  B  w
    rank 3:  .  .  .  .  .  .  F  f  .  .  .  .  .  .  .  .  .  .  .  .  b  w  B  w

On an even number of ranks, backwards wait three slots at rank 0, or they would meet the forwards of others.
"""

import numpy as np

from penstock.schedules.family import Family
from penstock.schedules.v.block import split_schedule
from penstock.schedules.v.slots import Ints


def block(num_ranks: int) -> Ints:
    """[num_ranks, 4] the slots of microbatch 0: F and b go down the ranks in two slots each, f and B up in one."""
    rank = np.arange(num_ranks)
    turn = 3 * num_ranks - 1
    wait = 3 if num_ranks % 2 == 0 else 0
    return np.column_stack([2 * rank, turn - 1 - rank, turn + wait + 2 * rank, 2 * turn + wait - rank])


FAMILY = Family(
    name="v-half",
    summary="a V with half of 1f1b's activations",
    source="Pipeline Parallelism with Controllable Memory, arXiv 2405.15362",
    placement="V",
    restrictions="two stages per rank",
    bubble="3p-4 times F = B = W of one stage for odd p > 1, 3p-7 for even p > 2, from m = p+2 on; none in every "
    "microbatch while W+2B >= 2F and W+2F >= 2B, B the input gradient",
    memory="at most min(2m, 2 floor(p/2) + 2) of half a rank's layers each",
    advice="half the memory of 1f1b for a smaller bubble; the first to try when activations do not fit",
    generate=split_schedule("v-half", block),
    stages_per_rank=(2,),
    example=(4, 4),
)
