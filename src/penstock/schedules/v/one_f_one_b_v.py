"""`1f1b-v`: a V with whole backwards in two thirds of 1F1B's memory (arXiv 2405.15362).

    4 ranks, 4 microbatches: the order of each rank

        0F0 0F1 0F2 0F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 0B0 0B1 0B2 0B3
        1F0 1F1 1F2 1F3 6F0 6F1 6B0 6F2 6B1 6B2 6F3 1B0 6B3 1B1 1B2 1B3
        2F0 2F1 2F2 5F0 5F1 5F2 5B0 2F3 5B1 2B0 5F3 5B2 2B1 5B3 2B2 2B3
        3F0 4F0 3F1 4F1 3F2 4F2 4B0 3B0 3F3 4F3 4B1 3B1 4B2 3B2 4B3 3B3

Forwards take one slot of time for each rank and backwards two. Its block on 4 ranks, with w for second slots:

    rank 0:  F  .  .  .  .  .  .  f  b  w  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .  B  w
    rank 1:  .  F  .  .  .  .  f  .  .  .  b  w  .  .  .  .  .  .  .  .  .  .  .  .  .  .  B  w
    rank 2:  .  .  F  .  .  f  .  .  .  .  .  .  b  w  .  .  .  .  .  .  .  B  w
    rank 3:  .  .  .  F  f  .  .  .  .  .  .  .  .  .  .  .  .  b  w  B  w

Backwards go in groups of three, of which one begins with the turn on the last rank. A group waits three slots for the
one before, and where 3 divides the number of ranks the first one waits too, or it would meet the forwards of others.

"""

import numpy as np

from penstock.schedules.family import Family
from penstock.schedules.v.block import whole_schedule
from penstock.schedules.v.slots import Ints


def block(num_ranks: int) -> Ints:
    """[num_ranks, 4] the first slots of microbatch 0: a forward is one slot later on its next rank, a backward two."""
    rank = np.arange(num_ranks)
    turn = 2 * num_ranks - 1
    backward = np.array([_backward_slot(step, num_ranks) for step in range(2 * num_ranks)])
    return np.column_stack([rank, turn - rank, backward[rank], backward[turn - rank]])


def _backward_slot(step: int, num_ranks: int) -> int:
    """The slot of the backward that has `step` before it, of which the first group may have one or two."""
    wait = 3 if num_ranks % 3 == 0 else 0
    num_waits = (step + (1 - num_ranks) % 3) // 3  # so that step p-1 begins a group
    return 2 * num_ranks + wait + 2 * step + 3 * num_waits


FAMILY = Family(
    name="1f1b-v",
    summary="a V with whole backwards and two thirds of 1f1b's activations",
    source="Pipeline Parallelism with Controllable Memory, arXiv 2405.15362",
    placement="V",
    restrictions="two stages per rank",
    bubble="at most 5(p-1) times F = B/2 of one stage from p microbatches on, where 1f1b has 6(p-1); none in "
    "every microbatch while B >= 2F",
    memory="at most min(2m, 2 floor(2p/3) + 2) of half a rank's layers each",
    advice="less memory and a smaller bubble than 1f1b for models whose backwards cannot be split",
    generate=whole_schedule("1f1b-v", block),
    stages_per_rank=(2,),
    example=(4, 4),
)
